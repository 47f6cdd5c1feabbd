"""Settings that a Python call gives beside a configuration."""

from pathlib import Path

import pytest

from qlora_wgpu import Config, load_config
from qlora_wgpu.config.loading import with_settings
from qlora_wgpu.errors import ConfigError


@pytest.fixture
def path(tmp_path):
    (tmp_path / "run.yaml").write_text("model: {path: m}\noptim: {weight_decay: 0.5}\n")
    return tmp_path / "run.yaml"


@pytest.mark.parametrize(
    "settings",
    [
        {"learning_rate": 1e-4},
        {"optim": {"learning_rate": 1e-4}},
        {"optim.learning_rate": 1e-4},
    ],
    ids=["key", "section", "dotted"],
)
def test_three_ways_to_name_a_setting(path, settings):
    config = load_config(path, settings)
    assert config.optim.learning_rate == 1e-4 and config.optim.weight_decay == 0.5
    given = {"model": {"path": "m"}, "optim": {"weight_decay": 0.5}}
    assert with_settings(given, settings).optim == config.optim
    assert with_settings(Config.model_validate(given), settings).optim == config.optim
    assert "learning_rate" not in given["optim"]  # the caller's own stays as it was


def test_names_of_sections_that_are_keys_as_well(path):
    config = load_config(path, {"train": "rows.jsonl", "eval": None})
    assert Path(config.data.train).name == "rows.jsonl" and config.data.eval is None
    assert load_config(path, {"train": {"max_steps": 3}}).train.max_steps == 3


@pytest.mark.parametrize("gpu", [0, "0", "llvmpipe"])
def test_a_device_is_named_as_a_model_takes_it(path, gpu):
    assert load_config(path, {"device": gpu}).device.gpu == str(gpu)


def test_paths_of_python(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    for given in ("here", Path("here"), tmp_path / "here"):
        assert load_config(path, {"path": given}).model.path == str(tmp_path / "here")
        assert with_settings({"model": {"path": given}}, {}).model.path == str(tmp_path / "here")
    assert with_settings({"model": {"path": "owner/name"}}, {}).model.path == "owner/name"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 1}, "there is no setting 'lr': did you mean 'optim.learning_rate'?"),
        ({"optim.lr": 1}, "there is no setting 'optim.lr': did you mean 'optim.learning_rate'?"),
        ({"optim": {"lr": 1}}, "there is no setting 'optim.lr'"),
        ({"optimizer.learning_rate": 1}, "there is no setting 'optimizer.learning_rate'"),
        ({"optim": 3}, "'optim' is a section: give its settings as a mapping"),
        ({"max_steps": 5, "train": {"max_steps": 5}}, "train.max_steps is given twice"),
        ({"max_steps": "5"}, "train.max_steps in the override \"train.max_steps='5'\" must be an"),
        ({"max_steps": 0}, "train.max_steps in the override 'train.max_steps=0' must be from 1"),
    ],
)
def test_what_is_wrong_is_one_sentence(path, settings, message):
    with pytest.raises(ConfigError) as raised:
        load_config(path, settings)
    assert message in str(raised.value) and "\n" not in str(raised.value)
