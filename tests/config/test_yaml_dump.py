"""A configuration written out, and read back."""

from __future__ import annotations

import pytest
import yaml
from support.yaml_texts import MODEL

from qlora_wgpu.config import Config, load_config


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optim": {"learning_rate": 1e-4, "adam_epsilon": 1e-12}, "eval": {"eval_steps": 0.1}},
        {"lora": {"target_modules": ["q_proj", "no", "1e-4", "null", "a, b", "x: y"]}},
        {"output": {"dir": "1e-4", "save_total_limit": None}},
        {"output": {"dir": "no"}},
        {"output": {"dir": "010"}},
        {"output": {"dir": "2024-01-01"}},
        {"output": {"dir": "  spaces # and: more "}},
        {"output": {"dir": "ünï/漢字/🙂"}},
        {"output": {"dir": "'\"\\ [x] {y} &z *w !v %u @t `s"}},
        {"data": {"chat_template": "{% for m in messages %}\r\n\t{{ m }}\n\n  {% endfor %}\n"}},
        {"data": {"chat_template": "{{ x }}\x85\u2028\u2029\ufeff\x00\x1b"}},
        {"data": {"chat_template": "{{ 'a' }} " * 100}},
        {"device": {"gpu": "NVIDIA: GeForce #1"}},
        {"train": {"num_train_epochs": 1e22}},
    ],
    ids=repr,
)
def test_the_dump_reads_back_equal(load, changes) -> None:
    config = Config(model={"path": "org/name"}, **changes)
    text = config.to_yaml()
    assert load(text) == config
    assert load(load(text).to_yaml()) == config


def test_the_dump_is_plain(load) -> None:
    text = Config(model={"path": "org/name"}, lora={"target_modules": ["q_proj"]}).to_yaml()
    assert "  learning_rate: 0.0002\n" in text
    assert "  target_modules: [q_proj]\n" in text
    assert "  path: org/name\n" in text
    assert yaml.safe_load(text)["optim"]["adam_epsilon"] == 1e-8  # any YAML reader takes it


def test_the_dump_holds_resolved_paths(load, tmp_path, monkeypatch) -> None:
    (tmp_path / "conf" / "t.jsonl").touch()
    config = load(MODEL + "data: {train: t.jsonl}\n")
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.chdir(other)
    (other / "config.yaml").write_text(config.to_yaml())
    assert load_config(other / "config.yaml") == config
