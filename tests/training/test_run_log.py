"""metrics.jsonl: whole rows only, and nothing about it ends a run."""

import json

import pytest

from qlora_wgpu.training.run_folder import RunLog, read_rows


@pytest.fixture
def warnings():
    return []


@pytest.fixture
def log(tmp_path, warnings):
    log = RunLog(tmp_path / "metrics.jsonl", warnings.append)
    log.begin()
    return log


def steps(path):
    return [row["step"] for row in read_rows(path)]


def test_rows_that_are_torn_or_none_are_left_out(tmp_path, log):
    path = tmp_path / "metrics.jsonl"
    log.append({"step": 1})
    with path.open("ab") as file:
        file.write(b'5\n{"step": NaN}\n\xff\xfe\n{"loss": 1}\n' + b"[" * 9000 + b"\n")
    log.append({"step": 2, "loss": 0.1 + 0.2})
    with path.open("ab") as file:
        file.write(b'{"step": 3')
    assert steps(path) == [1, 2]
    log.append({"step": 4})
    assert steps(path) == [1, 2, 4]
    log.keep(lambda row: row["step"] > 1)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows == [{"step": 2, "loss": 0.1 + 0.2}, {"step": 4}]


def test_rows_wait_until_they_can_be_written(tmp_path, log, warnings):
    path = tmp_path / "metrics.jsonl"
    path.unlink()
    path.mkdir()
    log.append({"step": 1})
    log.append({"step": 2})
    log.flush()
    assert len(warnings) == 1 and "metrics.jsonl cannot be written" in warnings[0]
    path.rmdir()
    log.append({"step": 3})
    assert steps(path) == [1, 2, 3] and len(warnings) == 1


def test_there_is_none(tmp_path):
    assert read_rows(tmp_path / "missing") == []
