"""What a callback may do with a step, without a run."""

from types import SimpleNamespace

import pytest

from qlora_wgpu.errors import CallbackError, ConfigError, DeviceError
from qlora_wgpu.training.callbacks import (
    CallbackHandler,
    TrainerCallback,
    check_callbacks,
    subscribe_callbacks,
)
from qlora_wgpu.training.checkpoints import RunState
from qlora_wgpu.training.step_log import StepMetrics


class Schedule:
    """Rates that fall to 0 at step 10."""

    factor, fixed_rate = 1.0, None

    def planned(self, step):
        return self.fixed_rate if self.fixed_rate is not None else (10 - step) / 8

    def rate(self, step):
        return self.factor * self.planned(step)


class Noted(TrainerCallback):
    def __init__(self):
        self.all = []

    def on_step_end(self, step):
        self.all.append(("end", step.step))

    def on_log(self, step, logs):
        self.all.append(("log", logs))

    def on_evaluate(self, step):
        self.all.append(("evaluated", step.eval_metrics))

    def on_save(self, step):
        self.all.append(("saved", step.saved))


@pytest.fixture
def handler():
    """A handler whose run has done 4 of 12 steps; ``calls`` is what was asked of the run."""
    calls = []
    state = RunState(step=4, learning_rate=0.5, eval_loss=1.5, eval_step=4)

    def save():
        calls.append("save")
        run.saved_at = state.step
        return run.can_save

    run = SimpleNamespace(
        state=state, total_steps=12, saved_at=3, save=save, can_save=True, model="model",
        folder=SimpleNamespace(checkpoint_folder=lambda step: f"step-{step}"), callbacks="some",
        events=SimpleNamespace(stop_run=calls.append, note=calls.append),
    )  # fmt: skip
    evaluator = SimpleNamespace(measure=lambda step: calls.append(("measure", step)))
    made = CallbackHandler(run, [Noted()], evaluator, SimpleNamespace(schedule=Schedule()))
    made.drain = lambda: calls.append("drain")
    made.calls = calls
    return made


def test_a_step_tells_where_the_run_is(handler):
    step = handler.present
    assert (step.step, step.total_steps, step.learning_rate) == (4, 12, 0.5)
    assert repr(step) == "Step(4 of 12)" and step.model == "model" and step.saved is None
    assert (step.loss, step.grad_norm) == (None, None) and handler.calls == ["drain"] * 2
    step.take(StepMetrics(1.0, 0.5, 2.0))
    handler.calls.clear()
    assert (step.loss, step.mean_token_accuracy, step.grad_norm) == (1.0, 0.5, 2.0)
    assert handler.calls == [] and step.eval_loss == 1.5
    assert step.eval_mean_token_accuracy is None and step.eval_metrics == {}
    handler.submitted(0, 0.0)
    assert handler.present.loss is None and handler.calls == []


def test_a_step_that_is_over_may_do_nothing(handler):
    old = handler.present
    handler.submitted(5, 0.25)
    for action in (old.stop, old.evaluate, old.save, lambda: old.scale_learning_rate(2.0),
                   lambda: old.set_learning_rate(0.5)):  # fmt: skip
        with pytest.raises(ConfigError, match="step 4 is over: use the latest step"):
            action()
    assert handler.calls == []
    handler.present.stop()
    handler.present.stop("enough")
    assert handler.calls == ["a callback stopped it", "enough"]


def test_an_evaluation_is_made_once_a_step(handler):
    state = handler.run.state
    assert handler.present.evaluate() == 1.5 and handler.calls == ["drain"]
    state.eval_step = 3
    assert handler.present.evaluate() == 1.5 and ("measure", 4) in handler.calls
    state.eval_loss = None
    with pytest.raises(ConfigError, match="no held-out data"):
        handler.present.evaluate()


@pytest.mark.parametrize(
    ("saved_at", "is_over", "can_save", "folder", "saves"),
    [(3, False, True, "step-4", 1), (4, False, True, "step-4", 0), (3, True, True, "step-3", 0),
     (3, False, False, None, 1)],
)  # fmt: skip
@pytest.mark.cover("all")
def test_a_checkpoint_is_written_once_a_step(handler, saved_at, is_over, can_save, folder, saves):
    handler.run.saved_at, handler.is_over, handler.run.can_save = saved_at, is_over, can_save
    assert handler.present.save() == folder and handler.calls.count("save") == saves


@pytest.mark.parametrize(
    ("step", "is_over", "rate", "factor"),
    [(4, False, 1.25, 2.0), (4, True, 1.25, 1.0), (4, False, 0.625, 1.0), (8, False, 0.5, 4.0),
     (12, False, 1.25, 1.0)],
)  # fmt: skip
@pytest.mark.cover("all")
def test_a_rate_is_set_for_the_next_step(handler, step, is_over, rate, factor):
    handler.run.state.step, handler.is_over = step, is_over
    handler.submitted(step, 0.5)
    handler.present.set_learning_rate(rate)
    assert handler.run.state.rate_factor == handler.optimizer.schedule.factor == factor
    notes = [call for call in handler.calls if call.startswith("after step")]
    assert len(notes) == (factor != 1.0) and "save" not in handler.calls


def test_the_last_step_may_have_a_rate_of_its_own(handler):
    handler.run.state.plateau = SimpleNamespace(rate=0.25)
    for step, factor in ((11, 2.0), (12, 2.0)):
        handler.run.state.step = step
        handler.submitted(step, 0.5)
        handler.present.set_learning_rate(0.5 if step == 11 else 0.75)
        assert handler.run.state.rate_factor == factor


def test_a_rate_of_zero_cannot_be_scaled(handler):
    handler.run.state.step = 9
    handler.submitted(9, 0.5)
    with pytest.raises(ConfigError, match="learning rate of step 10 is 0, so it cannot"):
        handler.present.set_learning_rate(0.5)
    handler.run.state.plateau = SimpleNamespace(rate=0.25)
    handler.present.set_learning_rate(0.5)
    assert handler.run.state.rate_factor == 2.0


def test_rates_are_scaled_and_a_checkpoint_of_the_step_keeps_it(handler):
    handler.run.saved_at = 4
    handler.present.scale_learning_rate(1.0)
    assert "save" not in handler.calls
    handler.present.scale_learning_rate(0.5)
    handler.present.scale_learning_rate(0.5)
    assert handler.run.state.rate_factor == 0.25 and handler.calls.count("save") == 2
    assert "after step 4 the learning rate is 0.156, 0.25 times the schedule's" in handler.calls
    handler.run.state.step = 12
    handler.present.scale_learning_rate(0.5)
    assert handler.run.state.rate_factor == 0.25


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), "1", None, True])
def test_rates_are_numbers_in_range(handler, value):
    for action in (handler.present.set_learning_rate, handler.present.scale_learning_rate):
        with pytest.raises(ConfigError, match="the learning rate"):
            action(value)
    assert handler.run.state.rate_factor == 1.0


# ---- calls ---------------------------------------------------------------------------------------


def test_rows_are_told_before_what_comes_after_them(handler):
    (noted,) = handler._callbacks
    handler.on_log({"loss": 1.0})
    assert noted.all == []
    handler.call("on_step_end")
    handler.on_evaluate({"eval_loss": 2.0, "eval_mean_token_accuracy": 0.5})
    handler.on_save("folder")
    row = {"eval_loss": 2.0, "eval_mean_token_accuracy": 0.5}
    assert noted.all == [("log", {"loss": 1.0}), ("end", 4), ("log", row), ("evaluated", row),
                         ("saved", "folder")]  # fmt: skip
    assert handler.present.eval_mean_token_accuracy == 0.5


def test_what_a_callback_causes_calls_none(handler):
    (noted,) = handler._callbacks
    noted.on_step_end = lambda step: handler.on_save("by itself")
    handler.call("on_step_end")
    assert noted.all == []
    handler.call("on_save")
    assert noted.all == [("saved", "by itself")]


def test_a_callback_that_fails_is_named_and_errors_of_the_run_are_its_own(handler):
    (noted,) = handler._callbacks

    def fail(error):
        def on_step_end(step):
            raise error

        noted.on_step_end = on_step_end

    fail(ValueError("no"))
    with pytest.raises(CallbackError, match=r"Noted\.on_step_end failed after step 4: ValueError"):
        handler.call("on_step_end")
    fail(DeviceError("gone"))
    with pytest.raises(DeviceError, match="gone"):
        handler.call("on_step_end")
    handler.on_save("folder")
    assert noted.all == [("saved", "folder")]


def test_a_run_that_is_over_is_let_go(handler):
    step = handler.present
    handler.release()
    assert handler.run.callbacks is None and handler._latest_step is None
    assert step.loss is None and handler.calls == [] and handler.present is step


def test_callbacks_are_checked_before_they_are_called():
    class Misspelt(TrainerCallback):
        def on_step(self, step):
            pass

    check_callbacks([])
    check_callbacks((Noted(), TrainerCallback()))
    for wrong in (Noted(), [Noted], [Noted(), 1], "a"):
        with pytest.raises(ConfigError, match="callbacks must be a list"):
            check_callbacks(wrong)
    with pytest.raises(ConfigError, match=r"Misspelt\.on_step is never called: .* on_step_end"):
        check_callbacks([Misspelt()])


def test_only_those_who_want_events_get_them():
    class Wants(TrainerCallback):
        def on_event(self, event):
            raise ValueError("no")

    feeds = []
    events = SimpleNamespace(subscribe=feeds.append)
    subscribe_callbacks(events, [Noted(), Wants()])
    (feed,) = feeds
    with pytest.raises(CallbackError, match=r"Wants\.on_event failed: ValueError: no"):
        feed.note("text")
