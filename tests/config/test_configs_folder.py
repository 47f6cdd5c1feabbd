"""The configurations that ship load, and the example holds the defaults."""

from pathlib import Path

import pytest
import yaml

from qlora_wgpu import load_config
from qlora_wgpu.config import Config

FOLDER = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda p: p.name)
def test_loads(path):
    assert load_config(path).model.path


def test_example_holds_every_default():
    config = load_config(FOLDER / "example.yaml")
    expected = Config(
        model={"path": config.model.path},
        data={"train": config.data.train, "eval": config.data.eval},
    )
    assert config == expected
    written = yaml.safe_load((FOLDER / "example.yaml").read_text("utf-8"))
    unwritten = {"optim": {"warmup_steps"}, "data": {"chat_template"}}
    for section, values in config.model_dump().items():
        assert set(values) - set(written[section]) == unwritten.get(section, set()), section
