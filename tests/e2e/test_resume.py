"""A run that is stopped anywhere and goes on is the run that was never stopped."""

import shutil
import signal
import threading

import pytest

from e2e.test_training import Warnings, config, metrics, opened, rows
from e2e.tiny import write_model
from qlora_wgpu import Trainer
from qlora_wgpu.errors import CheckpointError, ConfigError, TrainingError
from qlora_wgpu.training import Observer
from qlora_wgpu.training.divergence import Divergence

SETTINGS = {
    "train": {"num_train_epochs": 3, "max_steps": -1},
    "log": {"logging_steps": 2},
    "output": {"save_steps": 3, "save_total_limit": None},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("m") / "tiny")


def run(folder, device, out, *, observer=None, resume=False, dataset=None, **sections):
    settings = config(folder, out, **{**SETTINGS, **sections})
    model = opened(folder, device, lora_dropout=0.1)
    dataset = rows() if dataset is None else dataset
    return Trainer(model, settings, observer, resume=resume).train(dataset, rows(4, seed=1))


def adapter(out):
    return (out / "adapter" / "adapter_model.safetensors").read_bytes()


def logged(out):
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in metrics(out)]


@pytest.fixture(scope="module")
def whole(folder, device, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    assert run(folder, device, out).steps == 9
    return out


class Killed(Exception):
    pass


class Kill(Observer):
    """Ends the process' work at once, as a power cut does, when a step's figures arrive."""

    def __init__(self, at):
        self.at = at

    def step(self, row):
        if row["step"] >= self.at:
            raise Killed


class Stop(Observer):
    """Sends a signal while a step's micro-batches are being submitted."""

    def __init__(self, number, block):
        self.number, self.left = number, block

    def count(self, accumulate):
        def counted(*args, **options):
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(self.number)
            return accumulate(*args, **options)

        return counted


@pytest.mark.parametrize("at", [4, 6, 8])
@pytest.mark.parametrize("packing", [False, True])
def test_killed_and_resumed(folder, device, tmp_path, whole, at, packing):
    data = {"data": {"packing": packing}}
    train = {"train": {**SETTINGS["train"], "per_device_train_batch_size": 1}} if packing else {}
    reference = whole
    if packing:
        reference = tmp_path / "whole"
        run(folder, device, reference, **data, **train)
    with pytest.raises(Killed):
        run(folder, device, tmp_path / "r", observer=Kill(at), **data, **train)
    result = run(folder, device, tmp_path / "r", resume=True, **data, **train)
    assert adapter(tmp_path / "r") == adapter(reference)
    assert logged(tmp_path / "r") == logged(reference)
    assert result.eval_loss_before == metrics(reference)[0]["eval_loss"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("block", [1, 4, 7, 12])  # of two a step: in the middle of some
def test_stopped_and_resumed(folder, device, tmp_path, whole, monkeypatch, number, block):
    stop = Stop(number, block)
    from qlora_wgpu import QLoRAModel

    original = QLoRAModel.accumulate
    monkeypatch.setattr(QLoRAModel, "accumulate", stop.count(original))
    before = signal.getsignal(number)
    first = run(folder, device, tmp_path / "r", observer=stop)
    monkeypatch.undo()
    assert first.interrupted and first.steps == block // 2 and signal.getsignal(number) is before
    second = run(folder, device, tmp_path / "r", resume=True)
    assert not second.interrupted and second.steps == 9
    assert adapter(tmp_path / "r") == adapter(whole)
    assert logged(tmp_path / "r") == logged(whole)


def test_a_thread_cannot_take_signals_and_trains_all_the_same(folder, device, tmp_path, whole):
    thread = threading.Thread(target=run, args=(folder, device, tmp_path / "r"))
    thread.start()
    thread.join()
    assert adapter(tmp_path / "r") == adapter(whole)


def test_a_damaged_checkpoint_is_passed_over(folder, device, tmp_path, whole):
    shutil.copytree(whole, tmp_path / "r")
    newest = tmp_path / "r" / "checkpoints" / "step-9"
    weights = newest / "optimizer.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])

    observer = Warnings()
    run(folder, device, tmp_path / "r", observer=observer, resume=True)
    assert len(observer.texts) == 1 and observer.texts[0].startswith("step-9 is passed over")
    assert adapter(tmp_path / "r") == adapter(whole)
    for checkpoint in (tmp_path / "r" / "checkpoints").iterdir():
        (checkpoint / "trainer_state.json").write_text("{}x")
    with pytest.raises(CheckpointError, match="no checkpoint can be loaded"):
        run(folder, device, tmp_path / "r", resume=True)


def test_another_run_is_not_continued(folder, device, tmp_path, whole):
    shutil.copytree(whole, tmp_path / "r")
    kept = logged(tmp_path / "r")
    with pytest.raises(ConfigError, match=r"optim.learning_rate = 0.01, now it is 0.02"):
        run(folder, device, tmp_path / "r", resume=True, optim={"learning_rate": 2e-2})
    with pytest.raises(ConfigError, match="other training data"):
        run(folder, device, tmp_path / "r", resume=True, dataset=rows(seed=5))
    assert logged(tmp_path / "r") == kept


def test_resume_where_there_is_nothing_begins(folder, device, tmp_path, whole):
    run(folder, device, tmp_path / "r", resume=True)
    assert adapter(tmp_path / "r") == adapter(whole)


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
    loss, count = again.summed_loss(batches)
    assert loss / count == pytest.approx(held_out[best], abs=1e-4)


def test_a_loss_that_diverges_ends_the_run(folder, device, tmp_path, monkeypatch):
    watch = Divergence()
    assert not any(map(watch.diverged, [2.0, 2.2, 1.8, 2.0, 2.0, 9.0, *[3.6] * 3, 3.4, *[3.6] * 9]))
    assert watch.diverged(3.6)
    monkeypatch.setattr("qlora_wgpu.training.divergence._WORSE", -3.0)  # any loss is too high
    with pytest.raises(TrainingError, match=r"diverged: .* at step 10.*checkpoints.*learning_rate"):
        run(folder, device, tmp_path / "r", train={"max_steps": 20})
    kept = {p.name for p in (tmp_path / "r" / "checkpoints").iterdir()}
    assert kept == {"step-3", "step-6", "step-9"} and len(metrics(tmp_path / "r")) > 4
