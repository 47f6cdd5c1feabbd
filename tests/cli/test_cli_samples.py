"""Samples of data and of what a model says, where there are no colours, no screen, or no text."""

import base64
import io
import json
import re

import numpy as np
import pytest
from click.testing import CliRunner
from e2e.tiny import write_model
from PIL import Image
from rich.text import Text
from support.image_models import folder_of

from qlora_wgpu.cli.data import data
from qlora_wgpu.cli.train import _sample_rows
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.training import Sample
from qlora_wgpu.visible import without_empty_lines


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples")
    write_model(folder / "model")
    row = '{"prompt": "what is this? ", "completion": "a quick fox"}'
    (folder / "rows.jsonl").write_text((row + "\n") * 3)
    (folder / "run.yaml").write_text(
        f"model: {{path: {folder / 'model'}}}\n"
        f"data: {{train: {folder / 'rows.jsonl'}, max_seq_length: 64, cache: false}}\n"
    )
    return str(folder / "run.yaml")


def test_samples_in_a_pipe_have_no_frame_and_show_what_is_learnt(run, monkeypatch, tmp_path):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # which can be written, without a warning
    shown = CliRunner().invoke(data, [run, "--samples", "1"])
    assert shown.exit_code == 0, shown.output
    first, text, *others = shown.output.splitlines()
    assert first.startswith("--- 1 of 3: ") and first.endswith(" tokens")
    assert "what is this? {+a quick fox" in text and text.endswith("+}")
    assert others[0] == "tokens in {+ +} are trained on"
    assert max(map(len, shown.output.splitlines())) < 120 and "─" not in shown.output


def test_bars_are_written_where_the_encoding_has_no_blocks(run):
    """As a pipe's on Windows."""
    shown = CliRunner(charset="cp1252").invoke(data, [run, "--samples", "0"])
    assert shown.exit_code == 0 and f" 3  {'#' * 40}" in shown.output
    assert f" 3  {'█' * 40}" in CliRunner().invoke(data, [run, "--samples", "0"]).output


@pytest.mark.slow
def test_a_page_has_small_copies_of_images(tmp_path, monkeypatch):
    """However large they are, and one that appears twice in a row."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    folder_of("llava", tmp_path / "model")
    noise = np.random.default_rng(0).integers(0, 256, (900, 1800, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "large.png")
    turns = [{"from": "human", "value": "<image><image>?"}, {"from": "gpt", "value": "noise"}]
    row = {"conversations": turns, "images": ["large.png"] * 2}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (tmp_path / "run.yaml").write_text("model: {path: model}\ndata: {train: rows.jsonl}\n")
    page = tmp_path / "page.html"
    shown = CliRunner().invoke(data, [str(tmp_path / "run.yaml"), "--html", str(page)])
    assert shown.exit_code == 0, shown.output
    text = page.read_text("utf-8")
    assert "noise" in re.findall("<mark>(.*?)</mark>", text, re.S)[1]
    pictures = re.findall('<img src="data:image/jpeg;base64,([^"]*)"', text)
    assert len(pictures) == 2 and "1,800 x 900 pixels" in text
    assert Image.open(io.BytesIO(base64.b64decode(pictures[0]))).size == (192, 96)
    assert len(text) < 100_000

    monkeypatch.setattr("qlora_wgpu.cli.data._PICTURES", 1)  # a page has no more; others are named
    CliRunner().invoke(data, [str(tmp_path / "run.yaml"), "--html", str(page)])
    text = page.read_text("utf-8")
    assert text.count("data:image/jpeg") == 1 and text.count("1,800 x 900 pixels") == 2


def test_a_page_is_not_written_as_json(run, tmp_path):
    with pytest.raises(ConfigError, match="--json and --html are mutually exclusive"):
        CliRunner().invoke(
            data, [run, "--json", "--html", str(tmp_path / "x")], catch_exceptions=False
        )


@pytest.mark.parametrize("environ", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_screen_without_colours_shows_what_is_learnt(run, monkeypatch, environ):
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "80", **environ}.items():
        monkeypatch.setenv(name, value)
    shown = Text.from_ansi(CliRunner().invoke(data, [run, "--samples", "1"]).output).plain
    assert "╭─ 1 of 3" in shown and "{+a quick fox" in shown and "green tokens" not in shown


def test_a_screen_with_colours_has_them_alone(run, monkeypatch):
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = Text.from_ansi(CliRunner().invoke(data, [run, "--samples", "1"]).output).plain
    assert "╭─ 1 of 3" in shown and "green tokens are trained on" in shown and "{+" not in shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\n\nb\nc", "a\n\nb\nc"),
        ("a\n\n\n \n\t\nb\n  c\n\n", "a\n\nb\n  c"),
        ("\n" * 160, ""),
        ("\n\n  a", "  a"),
    ],
)
def test_empty_lines_of_a_text(text, shown):
    assert without_empty_lines(text) == shown


def test_a_model_that_says_nothing_is_told():
    texts = _sample_rows(Sample("Hi", "", "\n" * 99, ""), is_finished=True)
    assert texts == {"prompt": "Hi", "before": "(empty)", "after": "(empty)"}
    stopped = _sample_rows(Sample("Hi", "Ho", "a\n\n\n\nb", ""), is_finished=False)
    assert stopped == {"prompt": "Hi", "expected": "Ho", "before": "a\n\nb"}


@pytest.mark.parametrize(
    ("objective", "rows", "titles"),
    [
        (
            "dpo",
            [{"prompt": "what is this? ", "chosen": "a fox", "rejected": "a dog"}] * 4,
            ["1 of 4, chosen", "1 of 4, rejected", "2 of 4, chosen"],
        ),
        (
            "kto",
            [
                {"prompt": "what is this? ", "completion": "a dog", "label": False},
                {"prompt": "what is this? ", "completion": "a fox", "label": True},
            ],
            ["1 of 2, undesirable", "2 of 2, desirable"],
        ),
    ],
)
def test_answers_say_what_is_thought_of_them(run, tmp_path, objective, rows, titles):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [f"train.objective={objective}", f"data.train={tmp_path / 'rows.jsonl'}"]
    settings.append("train.per_device_train_batch_size=2")
    shown = CliRunner().invoke(data, [run, *settings])
    assert shown.exit_code == 0, shown.output
    lines = shown.output.splitlines()
    found = [line[4:].partition(":")[0] for line in lines if line.startswith("--- ")]
    assert found == titles
    assert any(line.startswith(" steps") and "of 2 x 16 rows" in line for line in lines)
    as_json = CliRunner().invoke(data, [run, *settings, "--json"])
    said = [json.loads(line)["answer"] for line in as_json.output.splitlines()]
    assert said[: len(titles)] == [title.partition(", ")[2] for title in titles][:3]


def test_the_text_of_a_cut_row_is_what_is_left_of_it(run, tmp_path):
    texts = ["once there was a fox", "a dog"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    settings = [f"data.train={tmp_path / 'rows.jsonl'}", "data.max_seq_length=8"]
    shown = CliRunner().invoke(data, [run, *settings, "--json"])
    rows = [json.loads(line) for line in shown.output.splitlines() if line.startswith("{")]
    assert [len(row["input_ids"]) for row in rows] == [8, len(rows[1]["input_ids"])]
    left = rows[0]["text"].removeprefix("<s>").lstrip()
    assert 0 < len(left) < len(texts[0]) and texts[0].startswith(left)
