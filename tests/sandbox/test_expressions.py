"""Regular expressions of strangers: Python's, with an end."""

from __future__ import annotations

import json
import re

import pytest

from qlora_wgpu.config import LoraConfig
from qlora_wgpu.errors import CheckpointError, ConfigError
from qlora_wgpu.families.family import LinearSpec
from qlora_wgpu.lora.adapter_config import read_adapter_config
from qlora_wgpu.lora.patterns import value_for
from qlora_wgpu.lora.targets import targeted
from qlora_wgpu.sandbox import expressions, process
from qlora_wgpu.sandbox.expressions import ExpressionError, begins, check_expression, fits

NAME = "model.layers.11.self_attn.q_proj"


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(process, "CHILD_SECONDS", 0.2)
    expressions._process().close()
    fits.cache_clear()
    yield
    expressions._process().close()


HANGING = [r"(\w+\.?)+!", r"(.*)*!", r"(.|\w)*!", r".*.*.*.*.*.*.*.*!", r"(.|\w)" * 40 + "!"]


@pytest.mark.parametrize("pattern", HANGING)
def test_searching_back_ends(pattern, impatient) -> None:
    with pytest.raises(ConfigError, match=r"names of modules takes more than 0\.2 seconds"):
        value_for({pattern: 3}, NAME * 3, 1)
    with pytest.raises(ConfigError, match=r"lora\.target_modules: .* takes more than"):
        targeted([LinearSpec(NAME * 3, 8, 8)], pattern)
    with pytest.raises(ExpressionError, match="takes more than"):
        begins(pattern, NAME * 3)


@pytest.mark.parametrize("pattern", [r".*self_attn", r"model\..*(q|k)_p.*j", r"self_attn", ""])
def test_beginnings_are_pythons(pattern) -> None:
    assert begins(pattern, NAME) == (re.match(pattern, NAME) is not None)


@pytest.mark.parametrize(
    "pattern",
    [r"^(?!.*visual).*(?:q_proj|v_proj).*$", r".*\.(q|v)_proj", "q_proj", r"(?i)Q_PROJ", r".*q.",
     r"(?P<a>.)(?P=a).*", r"model\.layers\.(?:[0-9]|1[0-5])\..*", r"(?s:.)*proj", "a{2}|.*j", ""],
)  # fmt: skip
def test_they_mean_what_python_has_them_mean(pattern) -> None:
    for text in (NAME, "model.visual.q_proj", "q_proj", "llama", ""):
        assert fits(pattern, text) == (re.fullmatch(pattern, text) is not None)


@pytest.mark.parametrize("pattern", ["(", "*", "(" * 9000 + ")" * 9000, "a" * 100_001])
def test_broken_ones(pattern, tmp_path) -> None:
    with pytest.raises(ExpressionError, match=r"expression|characters"):
        check_expression(pattern)
    with pytest.raises(ConfigError) as caught:
        LoraConfig(rank_pattern={pattern: 3})
    assert len(str(caught.value)) < 1000
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "alpha_pattern": {pattern: 2}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match="alpha_pattern") as refused:
        read_adapter_config(tmp_path / "adapter_config.json", [NAME])
    assert len(str(refused.value)) < 1000


def test_plain_names_need_no_process(monkeypatch) -> None:
    monkeypatch.setattr(expressions, "_process", lambda: pytest.fail("a process is started"))
    for pattern in ("v_proj", "self_attn.q_proj", "[kv]_proj", r"layers\.1\.mlp", "mlp.*"):
        value_for({pattern: 3}, NAME, 1)
