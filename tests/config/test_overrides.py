"""Settings that a Python call passes in addition to a configuration."""

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
        ({"lr": 1}, "unknown setting 'lr': did you mean 'optim.learning_rate'?"),
        ({"optim.lr": 1}, "unknown setting 'optim.lr': did you mean 'optim.learning_rate'?"),
        ({"optim": {"lr": 1}}, "unknown setting 'optim.lr'"),
        ({"optimizer.learning_rate": 1}, "unknown setting 'optimizer.learning_rate'"),
        ({"optim": 3}, "'optim' is a section: pass its settings as a mapping"),
        ({"max_steps": 5, "train": {"max_steps": 5}}, "train.max_steps is set twice"),
        ({"max_steps": "5"}, "train.max_steps in the override \"train.max_steps='5'\" must be an"),
        ({"max_steps": 0}, "train.max_steps in the override 'train.max_steps=0' must be from 1"),
    ],
)
def test_what_is_wrong_is_one_sentence(path, settings, message):
    with pytest.raises(ConfigError) as raised:
        load_config(path, settings)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_another_optimizer_than_the_files_comes_with_its_own_decay(tmp_path):
    """A run's config.yaml has every default filled in, which nobody chose."""
    path = tmp_path / "config.yaml"
    for name, other, decay in [("adamw", "lion", 0.99), ("lion", "adamw_8bit", 0.999)]:
        of_a_run = Config(model={"path": "m"}, optim={"name": name})
        path.write_text(of_a_run.to_yaml())
        changed = [
            load_config(path, [f"optim.name={other}"]),
            load_config(path, {"optim": {"name": other}}),
            with_settings(of_a_run, {"optim.name": other}),
        ]
        assert [config.optim.adam_beta2 for config in changed] == [decay] * 3
        assert load_config(path).optim == of_a_run.optim
        both = [f"optim.name={other}", "optim.adam_beta2=0.95"]
        assert load_config(path, both).optim.adam_beta2 == 0.95
    path.write_text("model: {path: m}\noptim: {adam_beta2: 0.9}\n")
    assert load_config(path, ["optim.name=lion"]).optim.adam_beta2 == 0.9
    chosen = Config(model={"path": "m"}, optim={"adam_beta2": 0.999})
    assert with_settings(chosen, {"name": "lion"}).optim.adam_beta2 == 0.999


@pytest.mark.parametrize("overrides", [None, 3, "train.max_steps=1"])
def test_overrides_of_another_type_are_refused(path, overrides):
    with pytest.raises(ConfigError, match="overrides must be a list of strings"):
        load_config(path, overrides)


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        (
            {"learning_rate": 1e-4},
            "unknown key 'learning_rate' in Config: it belongs in section 'o",
        ),
        ({"lora": {"rank": 8}}, "unknown key 'lora.rank' in Config: did you mean 'lora.r'?"),
        ({"trian": {}}, "unknown key 'trian' in Config: did you mean the section 'train'?"),
    ],
)
def test_unknown_keys_of_a_mapping_get_a_suggestion(sections, sentence):
    with pytest.raises(ConfigError) as failure:
        Config(model={"path": "m"}, **sections)
    assert sentence in str(failure.value)
