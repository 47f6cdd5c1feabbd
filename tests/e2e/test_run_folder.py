"""A run's folder that is full, lost, in use, or another run's: nothing that was trained is lost."""

import shutil

import pytest
from support.observing import observed

from e2e.stopped_runs import SETTINGS, Kill, Killed, adapter, logged, run, whole_run
from e2e.test_training import Warnings, config, opened, rows
from e2e.tiny import write_model
from qlora_wgpu import Trainer
from qlora_wgpu.errors import CheckpointError, ConfigError
from qlora_wgpu.training import Observer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("m") / "tiny")


@pytest.fixture(scope="module")
def whole(folder, device, tmp_path_factory):
    return whole_run(folder, device, tmp_path_factory.mktemp("whole") / "run")


def test_a_best_adapter_that_cannot_be_written_is_tried_again(
    folder, device, tmp_path, monkeypatch
):
    from qlora_wgpu.training import run as run_module

    save, failures = run_module.save_best, []

    def full(folder, *args):
        if len(failures) < 2:  # when it is measured, and at the next checkpoint
            failures.append(folder)
            raise CheckpointError(f"{folder} cannot be written: No space left on device")
        return save(folder, *args)

    best = {"eval": {"eval_steps": 2, "load_best_model_at_end": True}, "output": {"save_steps": 1}}
    run(folder, device, tmp_path / "whole", **best)
    monkeypatch.setattr(run_module, "save_best", full)
    observer = Warnings()
    run(folder, device, tmp_path / "r", observer=observer, **best)
    assert len(failures) == 2 and "is in memory only" in observer.texts[0]
    assert "was not saved" in observer.texts[1]
    for name in ("adapter", "best"):
        path = f"{name}/adapter_model.safetensors"
        assert (tmp_path / "r" / path).read_bytes() == (tmp_path / "whole" / path).read_bytes()


def test_a_checkpoint_that_cannot_be_written_does_not_end_a_run(
    folder, device, tmp_path, whole, monkeypatch
):
    from qlora_wgpu.training import run as run_module

    save = run_module.save_checkpoint

    def full(folder, model, state, *rest):
        if state.step in (3, 9):
            raise CheckpointError(f"{folder} cannot be written: No space left on device")
        save(folder, model, state, *rest)

    monkeypatch.setattr(run_module, "save_checkpoint", full)
    observer = Warnings()
    out = tmp_path / "r"
    run(folder, device, out, observer=observer)
    assert [t.split(":")[0] for t in observer.texts] == [
        "the state after step 3 was not saved",
        "the state after step 9 was not saved",
        "the state after step 9 was not saved",
    ]
    assert "step-6 is kept" in observer.texts[-1]
    assert adapter(out) == adapter(whole)
    monkeypatch.undo()
    run(folder, device, out, resume=True)
    assert adapter(out) == adapter(whole) and logged(out) == logged(whole)


class Lose(Observer):
    """Takes the run's folder away after a step."""

    def __init__(self, out):
        self.out, self.texts = out, []

    def step(self, row):
        if row["step"] == 4:
            shutil.rmtree(self.out)

    def warning(self, text):
        self.texts.append(text)


def test_a_run_whose_folder_is_lost_saves_its_adapter_elsewhere(
    folder, device, tmp_path, whole, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    observer = Lose(tmp_path / "r")
    with pytest.raises(CheckpointError, match=r"removed or replaced; the adapter after step 9 is"):
        run(folder, device, tmp_path / "r", observer=observer)
    [saved] = (tmp_path / "cache" / "qlora-wgpu" / "rescued").iterdir()
    name = "adapter_model.safetensors"
    assert (saved / name).read_bytes() == (whole / "adapter" / name).read_bytes()
    assert not (tmp_path / "r").exists()
    assert sum("metrics.jsonl cannot be written" in text for text in observer.texts) == 1
    others = saved.with_name("r-other")  # of another run of that name
    shutil.copytree(saved, others)
    (others / "run.txt").write_text(f"{tmp_path / 'elsewhere' / 'r'}\n")
    run(folder, device, tmp_path / "r", train={"max_steps": 1})
    assert [path.name for path in others.parent.iterdir()] == ["r-other"]


def test_two_runs_do_not_share_a_folder(folder, device, tmp_path):
    class Second(Observer):
        refused = 0

        def step(self, row):
            for options in ({"overwrite": True}, {"resume": True}):
                settings = config(folder, tmp_path / "r", **SETTINGS)
                with pytest.raises(ConfigError, match="another run is using"):
                    Trainer(model, settings, **options).train(rows(), rows(4, seed=1))
                self.refused += 1

    model, observer = opened(folder, device, lora_dropout=0.1), Second()
    run(folder, device, tmp_path / "r", observer=observer, train={"max_steps": 2})
    assert observer.refused == 2


def test_the_replaced_run_stays_until_the_new_one_has_a_checkpoint(
    folder, device, tmp_path, whole, monkeypatch
):
    shutil.copytree(whole, tmp_path / "r")
    settings = config(folder, tmp_path / "r", **SETTINGS)
    model = opened(folder, device, lora_dropout=0.1)
    with pytest.raises(Killed):
        Trainer(model, settings, callbacks=observed(Kill(2)), overwrite=True).train(
            rows(), rows(4, seed=1)
        )
    assert adapter(tmp_path / "r" / "replaced") == adapter(whole)
    with pytest.raises(Killed):
        Trainer(model, settings, callbacks=observed(Kill(4)), overwrite=True).train(
            rows(), rows(4, seed=1)
        )
    assert not (tmp_path / "r" / "replaced").exists()
