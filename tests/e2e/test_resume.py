"""A run that is stopped anywhere and goes on is the run that was never stopped."""

import signal
import threading

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.observing import observed

from e2e.stopped_runs import SETTINGS, Kill, Killed, adapter, logged, run, whole_run
from e2e.test_training import config, metrics, opened, rows
from e2e.tiny import write_model
from qlora_wgpu import LoraConfig, QLoRAModel, Trainer
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.training import Observer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("m") / "tiny")


@pytest.fixture(scope="module")
def whole(folder, device, tmp_path_factory):
    return whole_run(folder, device, tmp_path_factory.mktemp("whole") / "run")


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


PLATEAU = {
    "optim": {
        "learning_rate": 1e-2,
        "lr_scheduler_type": "reduce_lr_on_plateau",
        # An improvement by half is none that a run has here: rates fall after the second and third.
        "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5, "threshold": 0.5},
    },
    "eval": {"eval_steps": 2},
}


@pytest.mark.parametrize("at", [4, 5, 7])
def test_a_plateau_goes_on_with_what_it_knows(folder, device, tmp_path, at):
    run(folder, device, tmp_path / "whole", **PLATEAU)
    rates = [row["learning_rate"] for row in metrics(tmp_path / "whole") if "learning_rate" in row]
    assert rates == [1e-2, 1e-2, 5e-3, 2.5e-3, 1.25e-3]  # of steps 2, 4, 6, 8, 9
    with pytest.raises(Killed):
        run(folder, device, tmp_path / "r", observer=Kill(at), **PLATEAU)
    run(folder, device, tmp_path / "r", resume=True, **PLATEAU)
    assert adapter(tmp_path / "r") == adapter(tmp_path / "whole")
    assert logged(tmp_path / "r") == logged(tmp_path / "whole")


@pytest.mark.quick
@pytest.mark.parametrize("every", [0, 2])
def test_a_plateau_needs_evaluations(folder, device, tmp_path, every):
    settings = config(folder, tmp_path / "r", **{**PLATEAU, "eval": {"eval_steps": every}})
    trainer = Trainer(opened(folder, device), settings)
    needed = "eval_steps above 0" if every == 0 else r"data\.eval or data\.eval_split"
    with pytest.raises(ConfigError, match=f"depends on evaluations: set .*{needed}"):
        trainer.train(rows(), rows(4, seed=1) if every == 0 else None)
    assert not (tmp_path / "r").exists()


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


def test_moments_of_8_bits_go_on(folder, device, tmp_path):
    lora = LoraConfig(r=80, lora_alpha=8, target_modules=["down_proj"])

    def run_8bit(name, observer=None, optimizer="paged_adamw_8bit", **kept):
        settings = config(
            folder, tmp_path / name, train={"max_steps": 3}, eval={"eval_steps": 0},
            optim={"name": optimizer}, output={"save_steps": 1, "save_total_limit": None},
        )  # fmt: skip
        model = QLoRAModel.from_pretrained(folder, lora, device=device)
        return Trainer(model, settings, callbacks=observed(observer), **kept).train(rows())

    run_8bit("whole")
    with pytest.raises(Killed):
        run_8bit("r", Kill(2))
    state = load_file(tmp_path / "r" / "checkpoints" / "step-1" / "optimizer.safetensors")
    layer = "base_model.model.model.layers.0.mlp.down_proj"
    codes, scales = (state[f"{part}.{layer}.lora_A.weight"] for part in ("state1", "absmax1"))
    assert codes.dtype == np.uint8 and codes.shape == (80 * 52,) and scales.shape == (17,)
    assert state[f"state2.{layer}.lora_B.weight"].dtype == np.float32  # 36 · 80 are few
    assert run_8bit("r", resume=True).steps == 3
    assert adapter(tmp_path / "r") == adapter(tmp_path / "whole")
    with pytest.raises(ConfigError, match=r"optim.name = 'adamw_8bit', now it is 'adamw': resume"):
        run_8bit("r", optimizer="adamw", resume=True)


def test_lions_moment_goes_on(folder, device, tmp_path):
    def run_lion(name, observer=None, **kept):
        settings = config(
            folder, tmp_path / name, train={"max_steps": 4}, eval={"eval_steps": 0},
            optim={"name": "paged_lion_32bit", "learning_rate": 1e-3, "weight_decay": 0.1},
            output={"save_steps": 1, "save_total_limit": None},
        )  # fmt: skip
        model = QLoRAModel.from_pretrained(folder, LoraConfig(r=3), device=device)
        return Trainer(model, settings, callbacks=observed(observer), **kept).train(rows())

    run_lion("whole")
    with pytest.raises(Killed):
        run_lion("r", Kill(2))
    state = load_file(tmp_path / "r" / "checkpoints" / "step-1" / "optimizer.safetensors")
    assert state and all(name.startswith("exp_avg.") for name in state)
    assert any(array.any() for array in state.values())
    assert run_lion("r", resume=True).steps == 4
    assert adapter(tmp_path / "r") == adapter(tmp_path / "whole")


def test_resume_where_there_is_nothing_begins(folder, device, tmp_path, whole):
    run(folder, device, tmp_path / "r", resume=True)
    assert adapter(tmp_path / "r") == adapter(whole)


def test_all_steps_are_logged_and_the_rest_only_once(folder, device, tmp_path):
    settings = {"log": {"logging_steps": 4}, "eval": {"eval_steps": 4}}
    out, again = tmp_path / "whole", tmp_path / "r"
    run(folder, device, out, **settings)
    rows_of = [r["step"] for r in metrics(out) if "loss" in r]
    evaluated = [r["step"] for r in metrics(out) if "eval_loss" in r]
    assert rows_of == [4, 8, 9] and evaluated == [0, 4, 8, 9]

    class KillAtEnd(Observer):
        def evaluation(self, row):
            if row["step"] == 9:
                raise Killed

    with pytest.raises(Killed):
        run(folder, device, again, observer=KillAtEnd(), **settings)
    run(folder, device, again, resume=True, **settings)
    assert logged(again) == logged(out) and adapter(again) == adapter(out)
