"""What a user names, and the base and adapter that are meant."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from qlora_wgpu.config import load_config
from qlora_wgpu.errors import ConfigError, on_command_line
from qlora_wgpu.lora import AdapterConfig, save_adapter
from qlora_wgpu.runs.resolve import ModelRef, base_in, resolve_model


def adapter(folder, base):
    at = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    tensors = {f"{at}A.weight": np.ones((2, 4), np.float32)}
    tensors[f"{at}B.weight"] = np.ones((4, 2), np.float32)
    save_adapter(folder, tensors, AdapterConfig(2, 8, 0.0, ["q_proj"], False, base))
    return folder


@pytest.fixture
def place(tmp_path):
    """A base, and a run of it with an adapter and two checkpoints."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("")
    (run / "config.yaml").write_text(json.dumps({"model": {"path": str(tmp_path / "base")}}))
    for name in ("adapter", "checkpoints/step-9", "checkpoints/step-10"):
        adapter(run / name, "someone/else")
    return tmp_path


def test_a_run(place):
    run, base = place / "run", str(place / "base")
    assert resolve_model(str(run)) == ModelRef(base, str(run / "adapter"))
    checkpoint = str(run / "checkpoints" / "step-9")
    assert (
        resolve_model(checkpoint)
        == resolve_model(None, None, checkpoint)
        == ModelRef(base, checkpoint)
    )
    assert resolve_model(str(run), "other/model") == ModelRef("other/model", str(run / "adapter"))


def test_a_run_that_goes_on_has_its_newest_checkpoint(place):
    shutil.rmtree(place / "run" / "adapter")
    assert resolve_model(str(place / "run")).adapter.endswith("step-10")
    shutil.rmtree(place / "run" / "checkpoints")
    with pytest.raises(ConfigError, match="no adapter and no checkpoint yet"):
        resolve_model(str(place / "run"))


def test_a_revision_of_the_base_stands_behind_its_name(place):
    alone = str(adapter(place / "alone", "owner/base@v1"))
    assert resolve_model(alone) == ModelRef("owner/base@v1", alone)
    assert resolve_model("owner/base@v1") == ModelRef("owner/base@v1", None)
    config = adapter(place / "pefts", "owner/base") / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "revision": "v1"}))
    assert resolve_model(str(config.parent)).model == "owner/base@v1"


def test_an_adapter_that_belongs_to_no_run(place):
    alone = str(adapter(place / "alone", "owner/base"))
    assert resolve_model(alone) == ModelRef("owner/base", alone)
    nameless = str(adapter(place / "nameless", None))
    with pytest.raises(ConfigError, match="names no base model"):
        resolve_model(nameless)
    assert (
        resolve_model(None, "a/b", nameless)
        == resolve_model(nameless, "a/b")
        == ModelRef("a/b", nameless)
    )


def test_a_model_alone(place):
    for name in (str(place / "base"), "owner/model"):
        assert resolve_model(name) == resolve_model(None, name) == ModelRef(name, None)


def test_a_base_that_was_moved(place):
    (place / "base").rename(place / "moved")
    with pytest.raises(ConfigError, match=r"was trained on the model .*base, which does not exist"):
        resolve_model(str(place / "run"))
    assert resolve_model(str(place / "run"), str(place / "moved")).model == str(place / "moved")


def test_a_path_of_windows(place):
    settings = load_config(place / "run" / "config.yaml", {"model.path": r"C:\models\base"})
    with pytest.raises(
        ConfigError, match=r"model folder C:.*base does not exist: write / between folders$"
    ):
        base_in(settings)


def test_a_name_without_its_owner(place):
    settings = load_config(place / "run" / "config.yaml", {"model.path": "SmolLM2-135M"})
    with pytest.raises(ConfigError, match=r"folder; names on the .*, such as OWNER/SmolLM2-135M"):
        base_in(settings)


def test_a_base_that_is_a_link_to_nothing(place):
    (place / "base").rename(place / "moved")
    (place / "base").symlink_to("gone")
    with pytest.raises(ConfigError, match=r"base does not exist: it is a broken link to gone$"):
        base_in(load_config(place / "run" / "config.yaml"))


def test_a_configuration_whose_base_was_moved(place):
    settings = load_config(place / "run" / "config.yaml")
    assert base_in(settings) == str(place / "base")
    (place / "base").rename(place / "moved")
    with pytest.raises(
        ConfigError, match=r"base does not exist: if it has moved, set model.path to its"
    ):
        base_in(settings)
    typed = on_command_line("qlora-wgpu eval run")
    with typed, pytest.raises(ConfigError, match=r"it has moved, add model.path=FOLDER$"):
        base_in(settings)
    with pytest.raises(ConfigError, match=r"base does not exist: did you mean .*.bas\?"):
        (place / "moved").rename(place / "bas")
        base_in(settings)
    (place / "base").write_text("")
    with pytest.raises(
        ConfigError, match=r"model\.path is the file .*base: set it to the file's folder"
    ):
        base_in(settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("named", "what"),
    [
        (("nowhere", None, None), "there is no run, adapter or model in nowhere$"),
        (("{run}/..", None, None), "did you mean .*run\\?"),
        (("{run}/checkpoints", None, None), "checkpoints: did you mean .*.run\\?"),
        (("{run}/checkpoints/step-6", None, None), "step-6: did you mean .*.run\\?"),
        (("{run}s", None, None), "runs: did you mean .*.run\\?"),
        (("{config}", None, None), "run.yaml: did you mean .*.run\\?"),
        (("{run}/config.yaml", None, None), "config.yaml: did you mean .*.run\\?"),
        (("{base}/config.json", None, None), "config.json$"),
        ((None, None, None), "a run's folder, such as runs/first"),
        (("{run}", None, "x"), "both name an adapter"),
        (("{base}", "x", None), "both name a model"),
    ],
)
def test_what_is_meant_by_nothing(place, named, what):
    of_run = {"model": {"path": "base"}, "output": {"dir": str(place / "run")}}
    (place / "run.yaml").write_text(json.dumps(of_run))
    paths = {"run": place / "run", "base": place / "base", "config": place / "run.yaml"}
    named = [n and n.format(**paths) for n in named]
    with pytest.raises(ConfigError, match=what):
        resolve_model(*named)


def test_a_name_beside_runs_is_none_of_the_hub(place, monkeypatch):
    (place / "runs").mkdir()
    (place / "run").rename(place / "runs" / "first")
    monkeypatch.chdir(place)
    with pytest.raises(ConfigError, match=r"in runs/frist: did you mean runs.first\?"):
        resolve_model("runs/frist")
    assert resolve_model("base/frist") == ModelRef("base/frist", None)
