"""How a run ends: with its best adapter, early, diverged, or finished, which it then stays."""

import shutil

import pytest
from safetensors.numpy import load_file
from support.observing import observed

from e2e.stopped_runs import Told, adapter, files, run, whole_run
from e2e.test_training import config, metrics, opened, rows
from e2e.tiny import write_model
from qlora_wgpu import Trainer
from qlora_wgpu.errors import ConfigError, TrainingError
from qlora_wgpu.training.step_log import Divergence


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("m") / "tiny")


@pytest.fixture(scope="module")
def whole(folder, device, tmp_path_factory):
    return whole_run(folder, device, tmp_path_factory.mktemp("whole") / "run")


def test_the_best_adapter_is_kept_and_no_gain_ends_the_run(folder, device, tmp_path):
    # A rate that soon does harm.
    settings = {
        "train": {"max_steps": 30},
        "optim": {"learning_rate": 5e-2, "lr_scheduler_type": "constant"},
        "eval": {
            "eval_steps": 2, "early_stopping_patience": 2, "load_best_model_at_end": True,
        },
    }  # fmt: skip
    result = run(folder, device, tmp_path / "r", **settings)
    held_out = {r["step"]: r["eval_loss"] for r in metrics(tmp_path / "r") if "eval_loss" in r}
    best = min(held_out, key=lambda step: held_out[step])
    assert (result.best_step, result.best_eval_loss) == (best, held_out[best])
    assert result.stopped_early and result.steps == best + 4
    again = opened(folder, device)
    again.load_adapter(tmp_path / "r" / "adapter")
    batches = [([r["input_ids"]], [r["labels"]], None) for r in rows(4, seed=1)]
    loss, count, _ = again.summed_loss(batches)
    assert loss / count == pytest.approx(held_out[best], abs=1e-4)


def test_a_loss_that_diverges_ends_the_run(folder, device, tmp_path, monkeypatch):
    watch = Divergence()
    assert not any(map(watch.diverged, [2.0, 2.2, 1.8, 2.0, 2.0, 9.0, *[3.6] * 3, 3.4, *[3.6] * 9]))
    assert watch.diverged(3.6)
    monkeypatch.setattr("qlora_wgpu.training.step_log._WORSE", -3.0)  # any loss is too high
    with pytest.raises(TrainingError, match=r"diverged: .* at step 10.*checkpoints.*learning_rate"):
        run(folder, device, tmp_path / "r", train={"max_steps": 20})
    kept = {p.name for p in (tmp_path / "r" / "checkpoints").iterdir()}
    assert kept == {"step-3", "step-6", "step-9"} and len(metrics(tmp_path / "r")) > 4


def test_a_finished_run_is_left_as_it_is(folder, device, tmp_path, whole):
    shutil.copytree(whole, tmp_path / "r")
    observer = Told()
    result = run(folder, device, tmp_path / "r", observer=observer, resume=True)
    assert result.was_finished and result.steps == 9 and not result.interrupted
    assert observer.notes == [
        f"the run in {tmp_path / 'r'} is finished after 9 steps: there is nothing left to train"
    ]
    assert files(tmp_path / "r") == files(whole)
    shutil.rmtree(tmp_path / "r" / "adapter")
    run(folder, device, tmp_path / "r", resume=True)
    assert files(tmp_path / "r") == files(whole)


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_finished_run_goes_on_with_more_epochs(folder, device, tmp_path, schedule):
    """With a constant rate bit by bit as if that had been asked for from the first."""
    optim = {"learning_rate": 1e-2, "lr_scheduler_type": schedule}
    out, observer = tmp_path / "r", Told()

    def epochs(number):
        return {"train": {"num_train_epochs": number, "max_steps": -1}, "optim": optim}

    run(folder, device, tmp_path / "whole", **epochs(3))
    first = run(folder, device, out, **epochs(2))
    second = run(folder, device, out, observer=observer, resume=True, **epochs(3))
    assert (first.steps, second.steps) == (6, 9) and not second.was_finished
    assert (adapter(out) == adapter(tmp_path / "whole")) == (schedule == "constant")
    rates = [row["learning_rate"] for row in metrics(out) if "loss" in row]
    whole = [row["learning_rate"] for row in metrics(tmp_path / "whole") if "loss" in row]
    assert rates[-2:] == whole[-2:]
    [note] = observer.notes
    assert "now has 9 steps instead of 6: after step 6" in note
    assert ("cosine over 9 steps" in note) == (schedule == "cosine")
    # All parts count.
    assert second.num_tokens == metrics(out)[-2]["num_tokens"] > first.num_tokens
    assert second.seconds > first.seconds > 0
    again = run(folder, device, out, resume=True, **epochs(3))
    assert again.was_finished and again.seconds == second.seconds
    with pytest.raises(ConfigError, match="has done 9 steps, more than the 6 of"):
        run(folder, device, out, resume=True, **epochs(2))


def test_a_run_shorter_than_save_steps_is_known_as_finished(folder, device, tmp_path):
    settings = {"train": {"max_steps": 2}, "output": {"save_steps": 50}}
    out = tmp_path / "r"
    run(folder, device, out, **settings)
    before = files(out)
    assert run(folder, device, out, resume=True, **settings).was_finished
    with pytest.raises(ConfigError, match=r"optim.learning_rate = 0.01, now it is 0.02"):
        run(folder, device, out, resume=True, optim={"learning_rate": 2e-2}, **settings)
    assert files(out) == before
    shutil.rmtree(out / "checkpoints")  # as older versions left it
    before = files(out)
    with pytest.raises(ConfigError, match="has an adapter, but no checkpoint to resume from"):
        run(folder, device, out, resume=True, **settings)
    (out / "config.yaml").rename(out / "else.yaml")
    with pytest.raises(ConfigError, match=r"without its config\.yaml"):
        run(folder, device, out, resume=True, **settings)
    assert {k: v for k, v in files(out).items() if k != "else.yaml"} == before


HARM = {
    "train": {"max_steps": 30},
    "optim": {"learning_rate": 5e-2, "lr_scheduler_type": "constant"},
    "eval": {"eval_steps": 2, "early_stopping_patience": 2},
}


def test_an_early_stopped_run_does_not_go_on(folder, device, tmp_path):
    out = tmp_path / "r"
    first = run(folder, device, out, **HARM)
    before = files(out)
    assert first.stopped_early
    for _ in range(2):
        again = run(folder, device, out, resume=True, **HARM)
        assert again.was_finished and again.stopped_early and again.steps == first.steps
    assert files(out) == before
    patient = {**HARM, "eval": {**HARM["eval"], "early_stopping_patience": 3}}
    longer = run(folder, device, out, resume=True, **patient)
    assert longer.steps == first.steps + 2 and longer.stopped_early


def test_the_adapter_of_step_0_may_be_the_best(folder, device, tmp_path):
    """Numbers go up in training, and down in what is held out."""
    held_out = [{"input_ids": row["input_ids"][::-1]} for row in rows(4, seed=1)]
    settings = config(
        folder,
        tmp_path / "r",
        optim={"learning_rate": 5e-2, "lr_scheduler_type": "constant"},
        eval={"eval_steps": 1, "load_best_model_at_end": True},
    )
    observer, model = Told(), opened(folder, device)
    fresh = model.adapter_state_dict()
    result = Trainer(model, settings, callbacks=observed(observer)).train(rows(), held_out)
    assert result.best_step == 0 and result.best_eval_loss == result.eval_loss_before
    assert any("no evaluation was better than the one before" in text for text in observer.texts)
    kept = load_file(tmp_path / "r" / "adapter" / "adapter_model.safetensors")
    assert all((kept[name] == array).all() for name, array in fresh.items())
