"""Paths in configuration files: where what they name is looked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from support.yaml_texts import MODEL

from qlora_wgpu.config import values
from qlora_wgpu.errors import ConfigError


def test_data_is_found_beside_the_file_first(load, tmp_path) -> None:
    for folder in ("conf", "here"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "both.jsonl").touch()
    (tmp_path / "here" / "only_here.jsonl").touch()
    config = load(MODEL + "data: {train: both.jsonl, eval: only_here.jsonl}\n")
    assert config.data.train == str(tmp_path / "conf" / "both.jsonl")
    assert config.data.eval == str(tmp_path / "here" / "only_here.jsonl")


def test_missing_data_is_named_beside_the_file(load, tmp_path) -> None:
    config = load(MODEL + "data: {train: none.jsonl}\n")
    assert config.data.train == str(tmp_path / "conf" / "none.jsonl")


def test_data_in_an_override_is_found_here_first(load, tmp_path) -> None:
    for folder in ("conf", "here"):
        (tmp_path / folder / "both.jsonl").touch()
    (tmp_path / "conf" / "only_conf.jsonl").touch()
    config = load(MODEL, ["data.train=both.jsonl", "data.eval=only_conf.jsonl"])
    assert config.data.train == str(tmp_path / "here" / "both.jsonl")
    assert config.data.eval == str(tmp_path / "conf" / "only_conf.jsonl")


def test_model_path_is_a_folder_or_a_name_on_the_hub(load, tmp_path) -> None:
    (tmp_path / "conf" / "models" / "tiny").mkdir(parents=True)
    folder = str(tmp_path / "conf" / "models" / "tiny")
    assert load("model: {path: models/tiny}\n").model.path == folder
    assert load("model: {path: models/../models/tiny}\n").model.path == folder
    assert load("model: {path: org/name}\n").model.path == "org/name"
    assert load("model: {path: ./gone}\n").model.path == str(tmp_path / "conf" / "gone")
    assert load(f"model: {{path: {folder}}}\n").model.path == folder


def test_home_folder(load, tmp_path, monkeypatch) -> None:
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path))
    assert load(MODEL + "data: {train: ~/a.jsonl}\n").data.train == str(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("runs/x", "runs/x"),
        ("./runs/x", "{root}/conf/runs/x"),
        ("../runs/x", "{root}/runs/x"),
        ("{root}/abs", "{root}/abs"),
    ],
)
def test_output_folder(load, tmp_path, text, expected) -> None:
    text, expected = (part.replace("{root}", str(tmp_path)) for part in (text, expected))
    assert load(MODEL + f"output: {{dir: '{text}'}}\n").output.dir == (
        expected if expected == "runs/x" else os.path.normpath(expected)
    )


def test_output_folder_of_an_override_is_relative_to_here(load, tmp_path) -> None:
    assert load(MODEL, ["output.dir=./x"]).output.dir == str(tmp_path / "here" / "x")


def test_chat_template_as_name_text_or_file(load, tmp_path) -> None:
    (tmp_path / "conf" / "t.jinja").touch()
    (tmp_path / "conf" / "chatml").touch()

    def template(text):
        return load(MODEL + f"data: {{chat_template: {text}}}\n").data.chat_template

    assert template("chatml") == "chatml"
    assert template("t.jinja") == str(tmp_path / "conf" / "t.jinja")
    assert template("'{{ messages }}'") == "{{ messages }}"
    assert template("'{% for m in messages %}'") == "{% for m in messages %}"


def test_a_path_no_file_system_takes(load) -> None:
    long = "x" * 5000
    assert load(MODEL + f"data: {{train: {long}}}\n").data.train.endswith(long)


@pytest.mark.parametrize("key", ["model.path", "data.train", "output.dir"])
def test_what_yaml_reads_as_a_control_character_is_no_name_on_windows(load, monkeypatch, key):
    """Elsewhere it may be one."""
    section, leaf = key.split(".")
    text = f'{section}: {{{leaf}: "C:\\new"}}\n' + (MODEL if section != "model" else "")
    monkeypatch.setattr(values, "_ON_WINDOWS", False)
    assert getattr(getattr(load(text), section), leaf).endswith("C:\new")
    monkeypatch.setattr(values, "_ON_WINDOWS", True)
    with pytest.raises(ConfigError, match=r"U\+000A \(double quotes .* single quotes, or with /"):
        load(text)


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has names in Unicode, whatever the locale")
@pytest.mark.parametrize("key", ["model.path", "data.train", "output.dir"])
def test_a_name_that_the_locale_lacks_is_a_sentence(tmp_path, key):
    values = {"model": {"path": "base"}, "data": {"train": "a.jsonl"}, "output": {"dir": "out"}}
    section, leaf = key.split(".")
    values[section][leaf] = "é"
    (tmp_path / "run.yaml").write_text(json.dumps(values), encoding="utf-8")
    code = f"from qlora_wgpu import load_config; load_config({str(tmp_path / 'run.yaml')!r})"
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env={**os.environ, **locale}, capture_output=True, encoding="utf-8"
    )
    assert f"{key} in run.yaml (line 1) must be a valid file name" in done.stderr
