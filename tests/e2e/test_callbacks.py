"""What a program's own functions may do to a run between two steps."""

import json
from contextlib import closing

import numpy as np
import pytest

import qlora_wgpu
from e2e.test_training import config, metrics, opened, rows
from e2e.tiny import write_model
from qlora_wgpu import Observer, Step, Trainer
from qlora_wgpu.errors import CallbackError, ConfigError, TrainingError
from qlora_wgpu.training.observers import Events


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

    made = trainer("a", **{name: called(name) for name in ("on_step", "on_evaluate", "on_save")})
    result = made.train(rows(), rows(4, seed=1))
    assert [call[:2] for call in calls] == [
        ("on_evaluate", 0), ("on_step", 1), ("on_save", 2), ("on_step", 2), ("on_evaluate", 3),
        ("on_step", 3), ("on_save", 4), ("on_step", 4), ("on_step", 5), ("on_step", 6),
        ("on_save", 6), ("on_evaluate", 6), ("on_save", 6), ("on_save", 6),
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
    changed = trainer("changed", on_step=halve).train(rows())
    expected = [*planned[:2], *(0.5 * rate for rate in planned[2:])]
    assert rates(tmp_path / "changed") == pytest.approx(expected, rel=1e-12)
    state = json.loads((changed.run_dir / "checkpoints/step-6/trainer_state.json").read_text())
    assert state["rate_factor"] == 0.5

    def stop(step):
        halve(step)
        if step.step == 2:
            step.stop("enough for now")

    stopped = trainer("stopped", on_step=stop).train(rows())
    assert (stopped.steps, stopped.stop_reason) == (2, "enough for now")
    gone_on = trainer("stopped").train(rows(), resume=True)
    assert adapter(gone_on) == adapter(changed) != adapter(trainer("again").train(rows()))
    assert rates(tmp_path / "stopped") == rates(tmp_path / "changed")


def test_what_a_function_brings_about_calls_no_other(trainer):
    measured = []
    made = trainer(
        "run",
        on_save=lambda step: step.evaluate(),
        on_evaluate=lambda step: measured.append(step.step),
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


@pytest.mark.parametrize("name", ["on_step", "on_evaluate", "on_save"])
def test_a_function_that_fails_ends_the_run_saved(trainer, name):
    def fail(step):
        if step.step > 1:
            raise ValueError("no more")

    made = trainer("run", **{name: fail})
    with pytest.raises(CallbackError) as caught:
        made.train(rows(), rows(4, seed=1))
    told = str(caught.value)
    done = {"on_step": 2, "on_evaluate": 3, "on_save": 2}[name]
    assert told.startswith(f"{name} failed after step {done}: ValueError: no more; the run is ")
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(TrainingError, match="has not ended"):
        _ = made.result
    whole = trainer("run").train(rows(), rows(4, seed=1), resume=True)
    assert adapter(whole) == adapter(trainer("plain").train(rows(), rows(4, seed=1)))


def test_requests_that_cannot_be_granted(trainer, tmp_path):
    wrong = [
        (lambda step: step.evaluate(), "the run has no held-out data"),
        (lambda step: step.set_learning_rate(0), "a learning rate must be from"),
        (lambda step: step.set_learning_rate("1e-4"), "got '1e-4'"),
    ]
    for number, (function, message) in enumerate(wrong):
        with pytest.raises(CallbackError, match=message):
            trainer(f"wrong {number}", on_step=function).train(rows())
    early = trainer("early", on_evaluate=lambda step: step.set_learning_rate(1e-3))
    with pytest.raises(CallbackError, match="learning rate of step 1 is 0, so it cannot"):
        early.train(rows(), rows(4, seed=1))
    with pytest.raises(ConfigError, match="on_step must be a function of a step, got 3"):
        trainer("x", on_step=3)
    with pytest.raises(ConfigError, match="on_save must be a function"):
        qlora_wgpu.train({}, on_save=3)
    with pytest.raises(ConfigError, match="are mutually exclusive"):
        trainer("x").train(rows(), resume=True, overwrite=True)


def test_what_one_call_asks_for_is_not_asked_of_the_next(trainer):
    made = trainer("run", on_step=lambda step: step.set_learning_rate(np.float32(1e-3)))
    with closing(made.steps(rows(), overwrite=True)) as steps:
        next(steps)
    assert made.train(rows(), resume=True).steps == 6
    with pytest.raises(ConfigError, match="already contains a run"):
        made.train(rows())
    always = trainer("run", overwrite=True)
    assert always.train(rows(), resume=True).steps == 6  # which was there
    with closing(always.steps(rows())) as steps:
        assert next(steps).step == 1


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


@pytest.mark.parametrize("event", [*SAVED, "finished"])
def test_an_observer_that_fails_ends_the_run_saved(trainer, tmp_path, event):
    watch = failing(event)
    with pytest.raises(CallbackError) as caught:
        trainer("run", observer=watch).train(rows(), rows(4, seed=1))
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
        assert any(f"saved after step {n}, and resume" in told for n in done), told
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

    events = Events()
    events.subscribe(failing("step"))
    events.subscribe(Tells())
    settings = config(folder, tmp_path / "run", train={"max_steps": 6}, output={"save_steps": 5})
    with pytest.raises(CallbackError, match=r"Fails\.step failed"):
        Trainer(opened(folder, device), settings, events).train(rows())
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
