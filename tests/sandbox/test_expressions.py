"""Regular expressions of strangers: Python's, with an end."""

from __future__ import annotations

import json
import re

import pytest

from qlora_wgpu.config import LoraConfig
from qlora_wgpu.errors import CheckpointError, ConfigError
from qlora_wgpu.families.family import LinearSpec
from qlora_wgpu.lora.config import read_adapter_config, value_for
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


@pytest.mark.cover(pattern=HANGING[1:3])
@pytest.mark.slow
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


def test_many_patterns_are_asked_at_once_and_are_not_too_many(monkeypatch, tmp_path) -> None:
    patterns = {rf"(foo|bar{i}).*(x|y).*z": 3 for i in range(200)} | {r".*(q|k)_.*j": 5}
    asked = []
    in_child = expressions._in_child
    monkeypatch.setattr(
        expressions, "_in_child", lambda *given: asked.append(given[0]) or in_child(*given)
    )
    file = tmp_path / "adapter_config.json"
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    file.write_text(json.dumps({**fields, "rank_pattern": patterns}))
    config = read_adapter_config(file, [NAME])
    modules = [NAME.replace("11", str(layer)) for layer in range(8)]
    assert [config.rank_of(module) for module in modules] == [5] * 8
    assert len(asked) <= 2 + len(modules)  # for all patterns together
    file.write_text(json.dumps({**fields, "alpha_pattern": {f"q{i}": 2 for i in range(3000)}}))
    with pytest.raises(CheckpointError, match=r"alpha_pattern .* are 3,000 patterns, more than"):
        read_adapter_config(file, [NAME])
    file.write_text(json.dumps({**fields, "alpha_pattern": {"q_proj": 2, "(": 2}}))
    with pytest.raises(CheckpointError, match=r"alpha_pattern .* has '\(', which is not a regular"):
        read_adapter_config(file, [NAME])


def test_the_first_pattern_counts_whichever_way_it_is_tried() -> None:
    searching, plain = r"(a|b)*.*(q|k)_.*j", "q_proj"
    assert value_for({searching: 2, plain: 3}, NAME, 1) == 2
    assert value_for({plain: 3, searching: 2}, NAME, 1) == 3
    assert value_for({"k_proj": 3, searching: 2, "v_proj": 4}, NAME, 1) == 2
    assert value_for({"k_proj": 3, r"(a|b)*x*y": 2}, NAME, 1) == 1
