"""When a run's page is written, and what of its texts is in it."""

import json
from types import SimpleNamespace

import pytest

from qlora_wgpu.config import Config
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.runs import reporting
from qlora_wgpu.runs.reporting import Reporter
from qlora_wgpu.training import Sample


class Warned:
    def __init__(self):
        self.texts = []

    def warning(self, text):
        self.texts.append(text)


@pytest.fixture
def pages(monkeypatch):
    """The facts of each page that is written."""
    written = []
    monkeypatch.setattr(
        reporting, "write_report", lambda path, facts, rows: written.append((path, facts, rows))
    )
    return written


@pytest.fixture
def reporter(tmp_path, pages):
    settings = Config.model_validate(
        {"model": {"path": "a/base"}, "output": {"dir": str(tmp_path)}, "data": {"train": "rows"}}
    )
    return Reporter(settings, Warned())


def test_a_page_is_written_once_the_folder_is_the_runs_and_then_now_and_then(
    reporter, pages, monkeypatch
):
    now = iter(range(1000))
    monkeypatch.setattr(reporting, "time", SimpleNamespace(monotonic=lambda: next(now)))
    reporter.step({"step": 0})
    reporter.failed(ValueError("early"))
    assert not pages
    reporter.started(30, 0, {"base": 1})
    assert len(pages) == 1 and not pages[0][1].is_finished
    for step in range(1, 4):
        reporter.step({"step": step})
    assert len(pages) == 1  # so soon
    for step in range(4, 900):
        reporter.step({"step": step})
    assert 2 < len(pages) < 300
    reporter.failed(ValueError("it broke"))
    assert pages[-1][1].is_finished and pages[-1][1].state.endswith("with an error: it broke")


def test_texts_between_the_first_and_the_last_are_shown_with_their_steps(reporter, pages, tmp_path):
    rows = [
        {"step": 0, "prompt": "p", "text": "before"}, {"step": 1, "prompt": "p", "text": "one"},
        {"step": 2, "prompt": None, "text": "x"}, {"step": 3, "prompt": "p", "text": 7},
        {"step": 4, "prompt": "p", "text": "four"}, {"step": 4, "prompt": "q", "text": "other"},
    ]  # fmt: skip
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reporter.started(30, 0, {})
    assert reporter._texts_between() == {
        ("p", 0): [(1, "one"), (4, "four")],
        ("q", 0): [(4, "other")],
    }


def test_equal_prompts_have_their_own_pictures_and_texts(reporter, pages, tmp_path):
    rows = [{"step": n, "prompt": "p", "text": f"{n}{k}"} for n in (1, 2) for k in "ab"]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reporter.take_samples([Sample("p", "e", "b")] * 2, [["data:,1"], []])
    reporter.started(30, 0, {})
    samples = pages[-1][1].samples
    assert [each.between for each in samples] == [[(1, "1a"), (2, "2a")], [(1, "1b"), (2, "2b")]]
    assert [each.pictures for each in samples] == [["data:,1"], []]


def test_a_page_that_cannot_be_written_is_told_at_the_end_alone(reporter, monkeypatch):
    def failing(*given):
        raise CheckpointError("no room")

    monkeypatch.setattr(reporting, "write_report", failing)
    reporter.started(30, 0, {})
    assert not reporter._observer.texts
    reporter.failed(ValueError("it broke"))
    assert reporter._observer.texts == ["no room"]
