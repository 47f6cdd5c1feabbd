"""What a program's own functions may do to a run between two steps."""

import json
from contextlib import closing

import numpy as np
import pytest
from support.observing import calling, observed

import qlora_wgpu
from e2e.test_training import config, metrics, opened, rows
from e2e.tiny import write_model
from qlora_wgpu import Step, Trainer, TrainerCallback
from qlora_wgpu.errors import CallbackError, ConfigError, TrainingError
from qlora_wgpu.training import Observer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("m") / "tiny")


@pytest.fixture
def trainer(folder, device, tmp_path):
    """Makes a trainer of its own model, with dropout, and a run's folder by its name."""

    def make(name, **options):
        settings = config(folder, tmp_path / name, train={"max_steps": 6})
        return Trainer(opened(folder, device, lora_dropout=0.1), settings, **options)

    return make


def adapter(result):
    return (result.adapter_dir / "adapter_model.safetensors").read_bytes()


def rates(path):
    return [row["learning_rate"] for row in metrics(path) if "loss" in row]


def test_functions_are_called_with_what_is_known(trainer, tmp_path):
    calls = []

    def called(name):
        return lambda step: calls.append((name, step.step, step.loss, step.eval_loss, step.saved))

    names = ("on_step_end", "on_evaluate", "on_save")
    made = trainer("a", callbacks=[calling(**{name: called(name) for name in names})])
    result = made.train(rows(), rows(4, seed=1))
    assert [call[:2] for call in calls] == [
        ("on_evaluate", 0), ("on_step_end", 1), ("on_save", 2), ("on_step_end", 2),
        ("on_evaluate", 3), ("on_step_end", 3), ("on_save", 4), ("on_step_end", 4),
        ("on_step_end", 5), ("on_step_end", 6), ("on_save", 6), ("on_evaluate", 6),
        ("on_save", 6), ("on_save", 6),
    ]  # fmt: skip
    logged = {row["step"]: row for row in metrics(tmp_path / "a") if "loss" in row}
    assert all(call[2] == logged[call[1]]["loss"] for call in calls[1:])
    assert [c[3] for c in calls if c[0] == "on_evaluate"] == [
        row["eval_loss"] for row in metrics(tmp_path / "a") if "eval_loss" in row
    ]
    saved = [call[4].name for call in calls if call[0] == "on_save"]
    assert saved == ["step-2", "step-4", "step-6", "adapter", "step-6"]
    plain = trainer("plain").train(rows(), rows(4, seed=1))
    assert adapter(plain) == adapter(result)  # to look changes nothing


def test_a_changed_learning_rate_is_logged_and_survives(trainer, tmp_path):
    def halve(step):
        if step.step == 2:  # the checkpoint of this step was written before
            step.set_learning_rate(planned[2])  # as it is
            step.scale_learning_rate(0.25)
            step.scale_learning_rate(2)

    trainer("plain").train(rows())
    planned = rates(tmp_path / "plain")
    changed = trainer("changed", callbacks=[calling(on_step_end=halve)]).train(rows())
    expected = [*planned[:2], *(0.5 * rate for rate in planned[2:])]
    assert rates(tmp_path / "changed") == pytest.approx(expected, rel=1e-12)
    state = json.loads((changed.run_dir / "checkpoints/step-6/trainer_state.json").read_text())
    assert state["rate_factor"] == 0.5

    def stop(step):
        halve(step)
        if step.step == 2:
            step.stop("enough for now")

    stopped = trainer("stopped", callbacks=[calling(on_step_end=stop)]).train(rows())
    assert (stopped.steps, stopped.stop_reason) == (2, "enough for now")
    gone_on = trainer("stopped").train(rows(), resume=True)
    assert adapter(gone_on) == adapter(changed) != adapter(trainer("again").train(rows()))
    assert rates(tmp_path / "stopped") == rates(tmp_path / "changed")


def test_what_a_function_brings_about_calls_no_other(trainer):
    measured = []
    made = trainer(
        "run",
        callbacks=[
            calling(
                on_save=lambda step: step.evaluate(),
                on_evaluate=lambda step: measured.append(step.step),
            )
        ],
    )
    made.train(rows(), rows(4, seed=1))
    assert measured == [0, 3]  # and after steps 2, 4 and 6 within on_save


def test_a_loop_of_ones_own(trainer, tmp_path):
    made, losses = trainer("own"), []
    for step in made.steps(rows(), rows(4, seed=1)):
        losses.append(step.loss)
        if step.step == 4:
            first = step.evaluate()
            assert step.evaluate() == first == step.eval_loss
            assert step.save() == tmp_path / "own" / "checkpoints" / "step-4"
            assert step.model is made.model
    assert isinstance(step, Step) and repr(step) == "Step(6 of 6)"
    assert losses == [row["loss"] for row in metrics(tmp_path / "own") if "loss" in row]
    measured = [row["step"] for row in metrics(tmp_path / "own") if "eval_loss" in row]
    assert measured == [0, 3, 4, 6]
    assert made.result.steps == 6 and not made.result.interrupted
    plain = trainer("plain").train(rows(), rows(4, seed=1))
    assert adapter(made.result) == adapter(plain)
    assert step.save() == tmp_path / "own" / "checkpoints" / "step-6"  # which is there


def test_a_loop_that_is_left_is_a_run_that_is_stopped(trainer):
    made, kept = trainer("left"), []
    for step in made.steps(rows()):
        kept.append(step)
        if step.step == 3:
            break
    assert made.result.interrupted and made.result.steps == 3
    with pytest.raises(ConfigError, match="step 2 is over"):
        kept[1].save()
    made = trainer("left")
    with pytest.raises(ZeroDivisionError):
        for step in made.steps(rows(), resume=True):
            assert step.step > 3
            1 / (5 - step.step)
    assert made.result.steps == 5
    whole = trainer("left").train(rows(), resume=True)
    assert adapter(whole) == adapter(trainer("plain").train(rows()))


@pytest.mark.cover(name=["on_evaluate"])
@pytest.mark.parametrize("name", ["on_step_end", "on_evaluate", "on_save"])
def test_a_function_that_fails_ends_the_run_saved(trainer, name):
    def fail(step):
        if step.step > 1:
            raise ValueError("no more")

    made = trainer("run", callbacks=[calling(**{name: fail})])
    with pytest.raises(CallbackError) as caught:
        made.train(rows(), rows(4, seed=1))
    told = str(caught.value)
    done = {"on_step_end": 2, "on_evaluate": 3, "on_save": 2}[name]
    assert told.startswith(
        f"Calls.{name} failed after step {done}: ValueError: no more; the run is "
    )
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(TrainingError, match="has not ended"):
        _ = made.result
    whole = trainer("run").train(rows(), rows(4, seed=1), resume=True)
    assert adapter(whole) == adapter(trainer("plain").train(rows(), rows(4, seed=1)))


def test_requests_that_cannot_be_granted(trainer, tmp_path):
    wrong = [
        (lambda step: step.evaluate(), "the run has no held-out data"),
        (lambda step: step.set_learning_rate(0), "the learning rate must be from"),
        (lambda step: step.set_learning_rate("1e-4"), "got '1e-4'"),
    ]
    for number, (function, message) in enumerate(wrong):
        with pytest.raises(CallbackError, match=message):
            trainer(f"wrong {number}", callbacks=[calling(on_step_end=function)]).train(rows())
    early = trainer(
        "early", callbacks=[calling(on_evaluate=lambda step: step.set_learning_rate(1e-3))]
    )
    with pytest.raises(CallbackError, match="learning rate of step 1 is 0, so it cannot"):
        early.train(rows(), rows(4, seed=1))
    with pytest.raises(ConfigError, match="must be a list of TrainerCallback objects, got 3"):
        trainer("x", callbacks=3)
    with pytest.raises(ConfigError, match="must be a list of TrainerCallback objects, got <"):
        qlora_wgpu.train({}, callbacks=calling())
    with pytest.raises(ConfigError, match="are mutually exclusive"):
        trainer("x").train(rows(), resume=True, overwrite=True)


def test_what_one_call_asks_for_is_not_asked_of_the_next(trainer):
    made = trainer(
        "run",
        callbacks=[calling(on_step_end=lambda step: step.set_learning_rate(np.float32(1e-3)))],
    )
    with closing(made.steps(rows(), overwrite=True)) as steps:
        next(steps)
    assert made.train(rows(), resume=True).steps == 6
    with pytest.raises(ConfigError, match="already contains a run"):
        made.train(rows())
    always = trainer("run", overwrite=True)
    assert always.train(rows(), resume=True).steps == 6  # which was there
    with closing(always.steps(rows())) as steps:
        assert next(steps).step == 1


class Recorder(TrainerCallback):
    """Notes each call."""

    def __init__(self):
        self.calls, self.logs, self.events = [], [], []

    def __getattribute__(self, name):
        if name.startswith("on_") and name not in ("on_event", "on_log", "on_train_end"):
            return lambda step: self.calls.append((name, step.step))
        return super().__getattribute__(name)

    def on_log(self, step, logs):
        self.calls.append(("on_log", logs["step"]))
        self.logs.append(logs)

    def on_train_end(self, step, result):
        self.calls.append(("on_train_end", step.step))
        self.result = result

    def on_event(self, event):
        self.events.append(event)


def test_a_callback_sees_the_whole_run(trainer, tmp_path):
    watch = Recorder()
    made = trainer("a", callbacks=[watch])
    result = made.train(rows(), rows(4, seed=1))
    assert watch.calls[:4] == [
        ("on_train_begin", 0), ("on_log", 0), ("on_evaluate", 0), ("on_step_end", 1),
    ]  # fmt: skip
    assert watch.calls[-1] == ("on_train_end", 6) and watch.result == result == made.result
    assert watch.logs == metrics(tmp_path / "a")
    kinds = [event["event"] for event in watch.events]
    assert {"started", "step", "evaluation", "saved"} <= set(kinds)
    assert [e["loss"] for e in watch.events if e["event"] == "step"] == [
        row["loss"] for row in metrics(tmp_path / "a") if "loss" in row
    ]
    plain = trainer("plain").train(rows(), rows(4, seed=1))
    assert adapter(plain) == adapter(result)  # watching changes nothing


def test_a_run_that_is_stopped_at_once_goes_on(trainer):
    """Resumed, it begins again with on_train_begin."""
    stop = calling(on_train_begin=lambda step: step.stop("not now"))
    stopped = trainer("run", callbacks=[stop]).train(rows())
    assert (stopped.steps, stopped.interrupted, stopped.stop_reason) == (0, True, "not now")

    def two(step):
        begun.append(step.step)
        if step.step >= 2:
            step.stop()

    begun = []
    trainer("run", callbacks=[calling(on_step_end=two)]).train(rows(), resume=True)
    watch = Recorder()
    whole = trainer("run", callbacks=[watch]).train(rows(), resume=True)
    assert begun == [1, 2] and watch.calls[0] == ("on_train_begin", 2)
    assert adapter(whole) == adapter(trainer("plain").train(rows()))


def test_an_evaluation_in_on_train_begin_is_that_before_the_first_step(trainer, tmp_path):
    made = trainer("run", callbacks=[calling(on_train_begin=lambda step: step.evaluate())])
    result = made.train(rows(), rows(4, seed=1))
    measured = [row["step"] for row in metrics(tmp_path / "run") if "eval_loss" in row]
    assert measured == [0, 3, 6] and result.eval_loss_before is not None


@pytest.mark.cover(name=["on_train_begin", "on_event"])
@pytest.mark.parametrize("name", ["on_train_begin", "on_log", "on_event", "on_train_end"])
def test_each_method_that_fails_ends_the_run_with_its_name(trainer, name):
    def fail(*details):
        raise ValueError("no more")

    with pytest.raises(CallbackError, match=rf"^Calls\.{name} failed.*: ValueError: no more"):
        trainer("run", callbacks=[calling(**{name: fail})]).train(rows(), rows(4, seed=1))
    whole = trainer("run").train(rows(), rows(4, seed=1), resume=True)
    assert whole.steps == 6 and whole.was_finished == (name == "on_train_end")


def failing(event):
    """An observer, one event of which fails when it has come often."""

    class Fails(Observer):
        count = 0

        def __getattribute__(self, name):
            if name == event:
                object.__setattr__(self, "count", object.__getattribute__(self, "count") + 1)
                if object.__getattribute__(self, "count") == 2 or name in ("started", "finished"):
                    raise ValueError("no more")
            return super().__getattribute__(name)

    return Fails()


SAVED = {"step": 2, "evaluation": 3, "saved": 4, "started": 0}


@pytest.mark.cover(event=["step", "finished"])
@pytest.mark.parametrize("event", [*SAVED, "finished"])
def test_an_observer_that_fails_ends_the_run_saved(trainer, tmp_path, event):
    watch = failing(event)
    with pytest.raises(CallbackError) as caught:
        trainer("run", callbacks=observed(watch)).train(rows(), rows(4, seed=1))
    assert isinstance(caught.value.__cause__, ValueError)
    told = str(caught.value)
    assert told.startswith(f"Fails.{event} failed: ValueError: no more; the run is ")
    if event == "finished":
        assert told.endswith(f"finished, and its adapter is in {tmp_path / 'run' / 'adapter'}")
        whole = trainer("run").train(rows(), rows(4, seed=1), resume=True)
        assert whole.was_finished
    else:
        step = SAVED[event]
        done = {step, step + 1} if event == "step" else {step}  # one is on its way
        assert any(f"saved after step {n}: resume" in told for n in done), told
        whole = trainer("run").train(rows(), rows(4, seed=1), resume=True)
        plain = trainer("plain").train(rows(), rows(4, seed=1))
        assert metrics(tmp_path / "run")[-1]["step"] == 6
        assert adapter(whole) == adapter(plain)


def test_a_run_ends_saved_where_a_shown_runs_observer_fails(folder, device, tmp_path):
    """The others are told until the end."""
    told = []

    class Tells(Observer):
        def saved(self, place):
            told.append(place.name)

    watchers = observed(failing("step"), Tells())
    settings = config(folder, tmp_path / "run", train={"max_steps": 6}, output={"save_steps": 5})
    with pytest.raises(CallbackError, match=r"Fails\.step failed"):
        Trainer(opened(folder, device), settings, callbacks=watchers).train(rows())
    assert told in (["step-2"], ["step-3"])


def test_a_model_is_trained_by_one_run_at_a_time(trainer, folder, tmp_path):
    """Two would each go on from what the other one has learnt."""
    first = trainer("first")
    second = Trainer(first.model, config(folder, tmp_path / "second", train={"max_steps": 1}))
    with closing(first.steps(rows())) as steps:
        next(steps)
        with pytest.raises(
            ConfigError, match=r"first is training this model: wait for its end, or open"
        ):
            second.train(rows())
        assert not (tmp_path / "second").exists()
    assert first.result.interrupted
    assert second.train(rows()).steps == 1


@pytest.mark.quick
def test_a_method_that_is_never_called_is_refused(trainer):
    class Epochs(TrainerCallback):
        def on_epoch_end(self, step):
            pass

    with pytest.raises(ConfigError, match="on_epoch_end is never called: a Trainer"):
        trainer("a", callbacks=[Epochs()])


def test_a_callback_that_fails_at_the_end_says_that_the_run_is_saved(trainer):
    def fails(step):
        if step.saved is not None and step.saved.name == "adapter":
            raise ValueError("mine")

    made = trainer("a", callbacks=[calling(on_save=fails)])
    message = "failed after step 6: ValueError: mine; the run is saved after step 6: resume=True"
    with pytest.raises(CallbackError, match=message) as failure:
        made.train(rows())
    assert isinstance(failure.value.__cause__, ValueError)
    assert trainer("a", resume=True).train(rows()).steps == 6
