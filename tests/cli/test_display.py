"""The screen of a run, in a terminal and in a pipe."""

import io
import sys
from collections import Counter

import pytest

from qlora_wgpu.cli._display import TrainingDisplay, _workers_line, host_line, memory_line
from qlora_wgpu.cli._terminal import Terminal
from qlora_wgpu.training import RunSetup, WorkerMetrics

BASE = "a/" + 30 * "long/" + "path"
SETUP = RunSetup("a card", BASE, "nf4", "bfloat16", 16, 14, 77_824, 1, 16, 9, 99)


def screen(monkeypatch, *, terminal):
    for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    out = io.StringIO()
    out.isatty = lambda: terminal
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setenv("TERM", "xterm")
    console = Terminal()
    with TrainingDisplay(console) as display:
        display.planned(Counter(base=700 << 10, activations=3 << 20, norms=5))
        display.loading("", 0, 2)
        display.loading("", 2, 2)
        display.setup(SETUP)
        display.started(30, 0, Counter())
        display.activity("held-out loss: 12 of 208 rows")
        if terminal:
            console.print(display._progress)
        display.evaluation({"step": 0, "eval_loss": 2.5})
        for step in range(1, 31):
            row = {"step": step, "loss": 1.5, "grad_norm": 0.5, "learning_rate": 1e-4}
            display.step({**row, "tokens_per_second": 1234.0})
        if terminal:
            display.stop()
    return out.getvalue()


def test_a_pipe_gets_a_line_for_each_step_and_nothing_else(monkeypatch):
    text = screen(monkeypatch, terminal=False)
    assert "\x1b" not in text and "\r" not in text and "" not in text.splitlines()
    assert all(line == line.rstrip() for line in text.splitlines())
    assert text.count("\nstep ") == 31 and "\nstep    17  loss 1.5000  " in text
    assert f"base           {SETUP.base} (nf4, bfloat16)\n" in text
    assert "step           1 row × 16 micro-batches\n" in text
    assert "━" not in text


def test_a_terminal_gets_a_bar_that_lives_while_the_loss_is_measured(monkeypatch):
    text = screen(monkeypatch, terminal=True)
    assert "held-out loss: 12 of 208 rows" in text and "━" in text
    assert text.count("grad norm") == 10
    assert "30/30" in text and "loss 1.5000" in text.rpartition("30/30")[2]  # as it stays


def test_a_narrow_screen_gets_whole_lines(monkeypatch):
    monkeypatch.setattr("sys.stdout", io.StringIO())
    console = Terminal()
    console.width = 60
    display = TrainingDisplay(console)
    display.started(1, 0, Counter())
    row = {"step": 1, "loss": 1.5, "grad_norm": 0.5, "learning_rate": 1e-4}
    display.step({**row, "tokens_per_second": 1234.0})
    assert sys.stdout.getvalue() == "step     1  loss 1.5000  grad norm 0.500  lr 1.00e-04\n"


def test_weights_on_disk_are_shown_behind_host_memory():
    kinds = Counter(moments=3 << 20)
    assert host_line(kinds, 0) == memory_line(kinds, "host")
    assert host_line(kinds, 5 << 19) == f"{memory_line(kinds, 'host')}; weights on disk 2.5 MiB"


def test_the_memory_line_is_one_and_has_no_zeros():
    kinds = Counter({f"kind{i}": 2**40 >> i for i in range(30)})
    line = memory_line(kinds)
    assert len(line) <= 80 and "GiB" in line and "kind29" not in line
    line = memory_line(Counter(activations=3 << 20, norms=100))
    assert line == "planned device memory 3.0 MiB: activations 3.0"


def test_workers_of_a_cluster_get_a_line_when_they_change_and_now_and_then(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    both = (WorkerMetrics("0", 300, 300, 0.5), WorkerMetrics("1", 100, 100, 1.0))
    with TrainingDisplay(Terminal()) as display:
        display.started(30, 0, Counter())
        for step in range(1, 31):
            silent = (both[0], WorkerMetrics("1", 0, 0, 0.0, answers=False))
            display.workers(both if step < 15 else silent if step < 25 else both[:1])
            row = {"step": step, "loss": 1.5, "grad_norm": 0.5, "learning_rate": 1e-4}
            display.step({**row, "tokens_per_second": 1234.0})
    lines = [line for line in out.getvalue().splitlines() if "workers:" in line]
    assert len(lines) == 4  # steps 1, 11 and 21, and when one is gone
    assert lines[0].strip() == "workers: 0 75% at 600 tok/s, 1 25% at 100 tok/s"
    assert lines[2].endswith("1 no response") and lines[3].endswith("workers: 0 100% at 600 tok/s")
    assert "1,234 tok/s on 2" in out.getvalue() and "1,234 tok/s on 1" in out.getvalue()


@pytest.mark.parametrize(
    ("count", "more"), [(1, ""), (8, ""), (9, " and 1 more"), (20, " and 12 more")]
)
def test_of_many_workers_the_first_are_shown(count, more):
    workers = [WorkerMetrics(f"w{n}", 10, 10, 2.0, answers=n != 1) for n in range(count)]
    line = _workers_line(workers)
    assert line.endswith(more) and ("more" in line) == bool(more)
    shown = line.removesuffix(more).split(": ")[1].split(", ")
    assert len(shown) == min(count, 8)
    assert shown[0] == f"w0 {1 / count:.0%} at 5 tok/s"
    assert count == 1 or shown[1] == "w1 no response"


def test_workers_that_did_nothing_have_no_share():
    assert _workers_line([WorkerMetrics("a", 0, 0, 0.0)]).endswith("workers: a 0%")
