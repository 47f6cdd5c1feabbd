"""What a run goes on from: its own checkpoints, whole, with the settings, data and base it had."""

import shutil

import pytest
from safetensors.numpy import load_file, save_file

from e2e.stopped_runs import SETTINGS, Kill, Killed, adapter, files, logged, run, whole_run
from e2e.test_training import Warnings, config, opened, rows
from e2e.tiny import write_model
from qlora_wgpu import Trainer, load_config
from qlora_wgpu.errors import CheckpointError, ConfigError, QLoRAWarning


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("m") / "tiny")


@pytest.fixture(scope="module")
def whole(folder, device, tmp_path_factory):
    return whole_run(folder, device, tmp_path_factory.mktemp("whole") / "run")


def test_a_damaged_checkpoint_is_passed_over(folder, device, tmp_path, whole):
    shutil.copytree(whole, tmp_path / "r")
    newest = tmp_path / "r" / "checkpoints" / "step-9"
    weights = newest / "optimizer.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])

    observer = Warnings()
    run(folder, device, tmp_path / "r", observer=observer, resume=True)
    assert len(observer.texts) == 1 and observer.texts[0].startswith("step-9 is skipped")
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
    other = {"chat_template": "chatml", "train": "chats:test"}
    named = (
        r"other training data \(data.train was None, now it is 'chats:test'; "
        r"data.chat_template was None, now it is 'chatml'\): resume it with the same"
    )
    with pytest.raises(ConfigError, match=named):
        run(folder, device, tmp_path / "r", resume=True, dataset=rows(seed=5), data=other)
    assert logged(tmp_path / "r") == kept


def test_what_cannot_change_the_result_may_change(folder, device, tmp_path, whole):
    """Among it gradient checkpointing, whose bits are the same."""
    out = tmp_path / "r"
    with pytest.raises(Killed):
        run(folder, device, out, observer=Kill(4))
    model = opened(folder, device, lora_dropout=0.1)
    changed = {
        "data": {"cache": False},
        "train": {**SETTINGS["train"], "gradient_checkpointing": False},
        "eval": {"eval_steps": 0},
        "log": {"logging_steps": 1},
        "output": {"save_steps": 2},
    }
    settings = config(folder, out, **{**SETTINGS, **changed})
    Trainer(model, settings, resume=True).train(rows(), rows(4, seed=1))
    assert adapter(out) == adapter(whole)
    assert load_config(out / "config.yaml") == settings


def test_another_base_under_the_same_path_is_refused(folder, device, tmp_path, whole):
    shutil.copytree(whole, tmp_path / "r")
    base = tmp_path / "base"
    shutil.copytree(folder, base)
    run(base, device, tmp_path / "r", resume=True)  # the same elsewhere is the same
    before = files(tmp_path / "r")
    tensors = load_file(base / "model.safetensors")
    tensors["model.layers.0.input_layernorm.weight"][3] *= 1.01
    save_file(tensors, base / "model.safetensors")
    with pytest.raises(ConfigError, match="started with other base weights"):
        run(base, device, tmp_path / "r", resume=True)
    shutil.copytree(folder, base, dirs_exist_ok=True)
    text = (base / "config.json").read_text()
    (base / "config.json").write_text(text.replace("1e-05", "1e-06"))
    with pytest.raises(ConfigError, match=r"other values in the base's config\.json"):
        run(base, device, tmp_path / "r", resume=True)
    assert files(tmp_path / "r") == before


@pytest.mark.parametrize(
    "name",
    ["adapter_model.safetensors", "optimizer.safetensors", "trainer_state.json", "manifest.json"],
)
def test_files_of_another_step_are_noticed(folder, device, tmp_path, whole, name):
    shutil.copytree(whole, tmp_path / "r")
    checkpoints = tmp_path / "r" / "checkpoints"
    shutil.copy(checkpoints / "step-6" / name, checkpoints / "step-9" / name)
    observer = Warnings()
    run(folder, device, tmp_path / "r", observer=observer, resume=True)
    assert len(observer.texts) == 1 and observer.texts[0].startswith("step-9 is skipped")
    assert adapter(tmp_path / "r") == adapter(whole)
    assert logged(tmp_path / "r") == logged(whole)


BEST = {"eval": {"eval_steps": 2, "load_best_model_at_end": True}, "output": {"save_steps": 1}}


@pytest.fixture(scope="module")
def stopped(folder, device, tmp_path_factory):
    """A run that keeps its best adapter, killed after some steps."""
    out = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(Killed):
        run(folder, device, out, observer=Kill(6), **BEST)
    assert (out / "best" / "manifest.json").exists()
    return out


def damage(best):
    weights = best / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])


def without_manifest(best):
    (best / "manifest.json").unlink()


@pytest.mark.parametrize("harm", [damage, without_manifest])
def test_a_damaged_best_adapter_is_not_replaced(folder, device, tmp_path, stopped, harm):
    out = tmp_path / "r"
    shutil.copytree(stopped, out)
    harm(out / "best")
    before = files(out)
    with pytest.raises(CheckpointError, match=r"best.*restore it from a copy, or remove"):
        run(folder, device, out, resume=True, **BEST)
    assert files(out) == before
    shutil.rmtree(out / "best")
    observer = Warnings()
    run(folder, device, out, observer=observer, resume=True, **BEST)
    assert any("selected from here on" in text for text in observer.texts)


def test_changed_rows_of_the_log_are_told(folder, device, tmp_path, stopped):
    for name, change, is_told in (
        ("same", lambda text: text, False),
        ("changed", lambda text: text.replace('"loss": ', '"loss": 1', 1), True),
        ("fewer", lambda text: text.partition("\n")[2], True),
    ):
        out, observer = tmp_path / name, Warnings()
        shutil.copytree(stopped, out)
        log = out / "metrics.jsonl"
        log.write_text(change(log.read_text()))
        run(folder, device, out, observer=observer, resume=True, **BEST)
        told = [text for text in observer.texts if "metrics.jsonl" in text]
        assert bool(told) is is_told and len(told) < 2
        again = Warnings()  # what is told once has become the log
        run(folder, device, out, observer=again, resume=True, **BEST)
        assert not [text for text in again.texts if "metrics.jsonl" in text]


def test_without_an_observer_python_warns(folder, device, tmp_path, whole):
    shutil.copytree(whole, tmp_path / "r")
    (tmp_path / "r" / "checkpoints" / "step-9" / "trainer_state.json").write_text("x")
    with pytest.warns(QLoRAWarning, match="step-9 is skipped"):
        run(folder, device, tmp_path / "r", resume=True)
