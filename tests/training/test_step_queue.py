"""Parts of the steps that are on their way, without a run."""

from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

from qlora_wgpu.data import IGNORE_INDEX, Example
from qlora_wgpu.training import step_queue
from qlora_wgpu.training.batching import BatchSampler
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


class Plan(BatchSampler):
    """Two micro-batches a step, of rows that are numbered on; keys name step and index."""

    def __init__(self):
        self.__dict__.update(batch_size=2)

    def blocks(self, step):
        return [[(3 * step,), (3 * step + 1,)], [(3 * step + 2,)]]

    def dropout_key(self, step, index):
        return 100 * step + index


def run_of(*, is_random=True, has_weights=False, images=None, answers=None):
    rows = [
        Example(np.arange(1, n + 2, dtype=np.int32), np.arange(1, n + 2, dtype=np.int32),
                weight=float(n + 1)) for n in range(9)
    ]  # fmt: skip
    model = SimpleNamespace(
        is_random=is_random, checked=lambda ids, labels, mask: (ids, labels, mask)
    )
    told = []
    return SimpleNamespace(
        config=SimpleNamespace(data=SimpleNamespace(has_weights=has_weights)), model=model,
        plan=Plan(), rows=rows, longest=16, images=images, answers=answers, rollouts=None,
        stop=SimpleNamespace(requested=False), told=told,
        events=SimpleNamespace(warning=told.append),
        executor=SimpleNamespace(accumulate=lambda blocks, stopped: len([*blocks]) >= 0),
    )  # fmt: skip


@pytest.mark.parametrize("is_random", [True, False])
@pytest.mark.parametrize("has_weights", [True, False])
def test_micro_batches_of_a_step_are_its_rows(is_random, has_weights):
    run = run_of(is_random=is_random, has_weights=has_weights, images=lambda rows, *_: len(rows))
    made = list(queue_of(_run=run)._micro_batches(2, 2.0))
    assert [each.tokens for each in made] == [4 + 5, 6]
    assert [each.ids.shape[0] for each in made] == [2, 2]  # the missing row is padding
    assert made[0].ids[0, :4].tolist() == [1, 2, 3, 4] and not made[1].ids[1].any()
    keys = [2 * 100, 2 * 100 + 1] if is_random else [None, None]
    assert [each.dropout_key for each in made] == keys
    assert [each.images for each in made] == [2, 1]
    weights = [None if each.weights is None else np.unique(each.weights).tolist() for each in made]
    if has_weights:
        assert {2.0, 2.5} <= set(weights[0]) and 3.0 in weights[1]
    else:
        assert weights == [None, None]


@pytest.mark.parametrize("is_random", [True, False])
def test_answers_have_dropout_where_their_loss_is_taken(monkeypatch, is_random):
    kinds = ["reference", "loss", "loss"]
    asked = []

    def batches(blocks, size):
        asked.append((blocks, size))
        return [SimpleNamespace(kind=kind) for kind in kinds]

    run = run_of(is_random=is_random)
    monkeypatch.setattr(step_queue.MicroBatch, "of_answers", lambda model, batch, key: key)
    made = list(queue_of(_run=run)._answer_blocks(3, SimpleNamespace(batches=batches)))
    assert made == ([None, 300, 301] if is_random else [None] * 3)
    assert asked == [(run.plan.blocks(2), 2)]


def block(labels, tokens, *, is_measured=False):
    targets = np.full((1, 4), IGNORE_INDEX)
    targets[0, :labels] = 1
    return SimpleNamespace(targets=targets, tokens=tokens, is_measured=is_measured)


def submitted(run, *blocks, **parts):
    queue = queue_of(_run=run, **parts)
    queue._micro_batches = lambda step, unit: iter(blocks)
    queue._answer_blocks = lambda step, answers: iter(blocks)
    return queue._submit_micro_batches(4, 1.0)


def test_a_step_counts_its_tokens_and_leaves_out_what_has_no_label():
    run, given = run_of(), []
    run.executor.accumulate = lambda blocks, stopped: given.extend(blocks) or not stopped()
    blocks = block(2, 5), block(0, 7), block(1, 11, is_measured=True)
    assert submitted(run, *blocks) == 5 + 7
    assert given == [blocks[0], blocks[2]] and not run.told
    assert submitted(run, block(0, 7)) == 7
    assert run.told == ["step 4: none of its rows has labels, so nothing was updated"]
    run.answers = "answers"
    given.clear()
    assert submitted(run, blocks[1]) == 7 and given == [blocks[1]] and len(run.told) == 1
    run.answers, run.rollouts = None, SimpleNamespace(batches=lambda step: [block(0, step)])
    assert submitted(run) == 4
    assert "none of its completions has a loss" in run.told[1]


@pytest.mark.parametrize("when", ["before", "within", "at the end"])
def test_a_step_that_is_stopped_is_none(when):
    run = run_of()
    run.stop.requested = when == "before"

    def accumulate(blocks, stopped):
        for number, _ in enumerate(blocks):
            run.stop.requested = when == "within" and number == 0
        return when != "at the end"

    run.executor.accumulate = accumulate
    assert submitted(run, block(1, 1), block(1, 1)) is None


@pytest.mark.parametrize("plateau", [None, SimpleNamespace(rate=0.125)])
def test_a_step_is_queued_with_its_rate(plateau):
    done = []

    def noted(name, result=None):
        return lambda *what: done.append((name, *what)) or result

    run = run_of()
    run.state = SimpleNamespace(plateau=plateau, rate_factor=0.5)
    run.model.zero_stats = noted("zero")
    run.executor.worker_metrics = lambda: ("worker",)
    schedule = SimpleNamespace(rate=lambda step: step / 8, fixed_rate=None, factor=1.0)
    queue = queue_of(
        _run=run, _optimizer=SimpleNamespace(schedule=schedule, step=noted("update")),
        _readback=SimpleNamespace(request=noted("request")), _submitted=deque(),
        _callbacks=SimpleNamespace(submitted=noted("told"), present="present"),
    )  # fmt: skip
    queue._weight_unit = lambda step: 4.0
    queue._submit_micro_batches = lambda step, unit: 9 if step != 5 else None
    assert queue.submit(4) is True
    assert done == [("update", 4), ("request",), ("zero",), ("told", 4, 0.5)]
    assert (schedule.fixed_rate, schedule.factor) == (plateau and 0.125, 0.5)
    ((step, present),) = queue._submitted
    assert (step.step, step.learning_rate, step.tokens) == (4, 0.5, 9) and present == "present"
    assert (step.workers, step.weight_unit) == (("worker",), 4.0)
    assert queue.submit(5) is False and len(queue._submitted) == 1
    run.rollouts = SimpleNamespace(begin=lambda step: step == 7)
    assert queue.submit(6) is False and queue.submit(7) is True


def test_steps_are_finished_one_late_and_all_in_the_end():
    done = []
    run = SimpleNamespace(
        total_steps=9, config=SimpleNamespace(output=SimpleNamespace(save_steps=4)),
        save=lambda: done.append("saved"),
    )  # fmt: skip
    never = SimpleNamespace(is_due=lambda step: False, has_stalled=False)
    full = iter([True, False, False])
    queue = queue_of(
        _run=run, _evaluator=never, _texts=never, _submitted=deque(),
        _disk=SimpleNamespace(after_step=lambda: ""),
        log=SimpleNamespace(finish=lambda step, data: (step, data)),
    )  # fmt: skip

    class Readback:
        full = property(lambda self: next(full, False))
        take = staticmethod(lambda: "data")

    queue._readback = Readback()
    for step in (1, 2):
        queue._submitted.append((step, SimpleNamespace(take=done.append)))
    queue.follow(2)
    assert done == [(1, "data")] and len(queue._submitted) == 1
    queue.follow(3)
    assert done == [(1, "data")]
    queue.follow(4)
    assert done == [(1, "data"), (2, "data"), "saved"]
    queue._submitted.append((5, SimpleNamespace(take=done.append)))
    queue.finish_all()
    assert done[-1] == (5, "data") and not queue._submitted
