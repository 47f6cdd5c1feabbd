"""Parts of the steps that are on their way, without a run."""

from types import SimpleNamespace

import pytest

from qlora_wgpu.training.step_queue import StepQueue


def queue_of(**parts):
    made = StepQueue.__new__(StepQueue)
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def test_the_weights_of_a_step_are_counted_in_its_own_largest():
    rows = [SimpleNamespace(weight=2.0**n, num_label_tokens=n != 3) for n in range(4)]
    steps = [[[(0,)]], [[(1,), (2, 3)]], [[(3,)]]]
    data = SimpleNamespace(has_weights=True)
    run = SimpleNamespace(
        config=SimpleNamespace(data=data), answers=None, rows=rows,
        plan=SimpleNamespace(blocks=steps.__getitem__),
    )  # fmt: skip
    queue = queue_of(_run=run)
    assert [queue._weight_unit(step) for step in (1, 2, 3)] == [1.0, 4.0, 1.0]
    run.answers = "answers"
    assert queue._weight_unit(2) == 1.0
    run.answers, data.has_weights = None, False
    assert queue._weight_unit(2) == 1.0


@pytest.mark.parametrize("stalled", [False, True])
def test_what_is_due_is_done_after_a_step(stalled):
    """A slow disk is reported last; a run that stops early is not saved because of it."""
    done, disk = [], iter(["", "little room", ""])
    run = SimpleNamespace(
        events=SimpleNamespace(warning=done.append), save=lambda: done.append("saved"),
        total_steps=6, state=SimpleNamespace(without_gain=2),
        config=SimpleNamespace(
            output=SimpleNamespace(save_steps=2),
            eval=SimpleNamespace(metric_for_best_model="loss"),
        ),
    )  # fmt: skip
    evaluator = SimpleNamespace(
        is_due=lambda step: step == 4, measure=lambda step: done.append("measured"),
        has_stalled=stalled,
    )  # fmt: skip
    texts = SimpleNamespace(is_due=lambda step: step == 5, write=lambda step: done.append("texts"))
    queue = queue_of(
        _run=run, _evaluator=evaluator, _texts=texts, _submitted=[],
        _disk=SimpleNamespace(after_step=lambda: next(disk)),
    )  # fmt: skip
    told = []
    for step in (4, 5, 6):
        queue.follow(step)
        told.append(list(done))
        done.clear()
    if stalled:
        assert "no longer falls, for 2 evaluations" in told[0][1] and "saved" not in told[0]
        return
    assert told == [["measured", "saved"], ["texts", "little room"], []]
