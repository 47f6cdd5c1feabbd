"""Parts of the loop over steps, without a run."""

from types import SimpleNamespace

from qlora_wgpu.training.loop import TrainingLoop


def loop_of(**parts):
    made = TrainingLoop.__new__(TrainingLoop)
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def test_the_weights_of_a_step_are_counted_in_its_own_largest():
    rows = [SimpleNamespace(weight=2.0**n, num_label_tokens=n != 3) for n in range(4)]
    steps = [[[(0,)]], [[(1,), (2, 3)]], [[(3,)]]]
    data = SimpleNamespace(has_weights=True)
    run = SimpleNamespace(config=SimpleNamespace(data=data), answers=None)
    loop = loop_of(_run=run, _plan=SimpleNamespace(blocks=steps.__getitem__), _rows=rows)
    assert [loop._weight_unit(step) for step in (1, 2, 3)] == [1.0, 4.0, 1.0]
    run.answers = "answers"
    assert loop._weight_unit(2) == 1.0
    run.answers, data.has_weights = None, False
    assert loop._weight_unit(2) == 1.0


def test_a_disk_that_fills_up_is_told_after_the_step():
    told, disk = [], iter(["", "little room", ""])
    observer = SimpleNamespace(check=lambda: None, stop_reason=None, warning=told.append)
    run = SimpleNamespace(observer=observer, state=SimpleNamespace(step=4))
    followed = []
    loop = loop_of(
        _run=run, _plan=SimpleNamespace(total_steps=7),
        _evaluator=SimpleNamespace(has_stalled=False),
        _disk=SimpleNamespace(after_step=lambda: next(disk)),
        _steering=SimpleNamespace(stepped=lambda: None, present="a step"),
        _submit=lambda step, stop: True, _follow=lambda step, stop: followed.append(step),
    )  # fmt: skip
    stop = SimpleNamespace(requested=False)
    seen = [(step, list(told)) for step in loop._do_steps(stop)]
    assert seen == [("a step", []), ("a step", ["little room"]), ("a step", ["little room"])]
    assert followed == [5, 6, 7] and not stop.requested


def test_steps_end_where_one_is_stopped_or_nothing_gets_better():
    observer = SimpleNamespace(check=lambda: None, stop_reason="asked", warning=print)
    run = SimpleNamespace(observer=observer, state=SimpleNamespace(step=0))
    asked, evaluator = [], SimpleNamespace(has_stalled=False)
    loop = loop_of(
        _run=run, _plan=SimpleNamespace(total_steps=9), _evaluator=evaluator,
        _disk=SimpleNamespace(after_step=lambda: ""),
        _steering=SimpleNamespace(stepped=lambda: None, present="a step"),
        _submit=lambda step, stop: asked.append((step, stop.requested)) or step < 3,
        _follow=lambda step, stop: None,
    )  # fmt: skip
    assert len(list(loop._do_steps(SimpleNamespace(requested=False)))) == 2
    assert asked == [(1, True), (2, True), (3, True)]
    evaluator.has_stalled = True
    assert not list(loop._do_steps(SimpleNamespace(requested=False))) and len(asked) == 3
