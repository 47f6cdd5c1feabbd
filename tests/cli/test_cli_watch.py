"""``watch`` shows a run from its folder alone, whoever writes it."""

import json
import os
import socket
from copy import deepcopy

import pytest
from click.testing import CliRunner
from rich.console import Console

from qlora_wgpu.cli import commands
from qlora_wgpu.cli.watch import shown
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.report.page import MARK, dots
from qlora_wgpu.runs.reporting import RunStatus
from qlora_wgpu.training.run_folder import RunFolder

ROWS = [
    {"step": 0, "eval_loss": 3.0, "eval_mean_token_accuracy": 0.1},
    *(
        {"step": i, "loss": 3 - i / 10, "mean_token_accuracy": i / 20, "grad_norm": 1.0,
         "learning_rate": 1e-4, "tokens_per_second": 1000.0, "num_tokens": i}
        for i in range(1, 11)
    ),
    {"step": 10, "eval_loss": 2.1, "eval_mean_token_accuracy": 0.4},
]  # fmt: skip
TEXTS = [
    {"step": 0, "prompt": "p", "expected": "", "text": "old"},
    {"step": 10, "prompt": "Who\nis [b]it[/b]?", "expected": "", "text": "\x1b[31mA cat."},
]


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "run", "model: {path: x}\n")
    for row in ROWS:
        folder.log.append(row)
    for row in TEXTS:
        folder.texts.append(row)
    yield folder
    folder.close()


def text_of(view, width=200):
    console = Console(width=width, markup=False)
    with console.capture() as captured:
        console.print(shown(view, width))
    return captured.get()


def test_a_run_that_goes_on_and_has_ended(run):
    run.note_steps(20)
    view = RunStatus(run.path)
    assert (view.step, view.total_steps, view.is_running) == (10, 20, True)
    text = text_of(view)
    parts = "step 10 of 20", "the run is in progress", "loss 2.0000  acc 50.0%", "1,000 tok/s"
    for part in (*parts, "held-out loss 2.1000  acc 40.0%  after step 10", "samples after step 10"):
        assert part in text
    assert "old" not in text and text.count(MARK) >= 4
    run.note_steps(10)
    run.close()
    assert "the run has ended" in text_of(RunStatus(run.path))
    run.log.append(ROWS[9])  # as if steps were done again
    assert "no process is running it" in text_of(RunStatus(run.path))


def test_who_runs_it(run):
    told = {"total_steps": 20, "pid": 2**22 + 5, "host": socket.gethostname()}
    for change, known in (({}, False), ({"host": "elsewhere"}, None), ({"pid": os.getpid()}, True),
                          ({"pid": "x"}, False), ({"total_steps": "x"}, False)):  # fmt: skip
        (run.path / "progress.json").write_text(json.dumps(told | change))
        assert RunStatus(run.path).is_running is known
    (run.path / "progress.json").write_text("{")
    assert RunStatus(run.path).total_steps == 0
    assert "step 10  no process is running it" in text_of(RunStatus(run.path))


def test_on_the_command_line(run, tmp_path):
    done = CliRunner().invoke(deepcopy(commands), ["watch", str(run.path)])
    assert done.exit_code == 0 and "loss 2.0000" in done.output
    assert "Who is [b]it[/b]?" in done.output and "\x1b" not in done.output
    with pytest.raises(ConfigError, match="contains no run"):
        RunStatus(tmp_path)


def test_an_empty_run_and_a_narrow_terminal(run):
    (run.path / "metrics.jsonl").write_text("")
    (run.path / "samples.jsonl").unlink()
    assert "step 0" in text_of(RunStatus(run.path))
    assert dots([], [], 10, 3) is None


def test_a_drawing():
    rows, up = dots([(0, 0.0), (10, 10.0)], [(10, 0.0)], 4, 2, may_be_log=False)
    assert up.low < 0 and up.high > 10
    assert rows == ["⠀⠀⡠⠊", f"⡠⠊⠀{MARK}"]
    [row], _ = dots([(3, 1.0)], [], 3, 1)
    assert sum(character != "\u2800" for character in row) == 1
