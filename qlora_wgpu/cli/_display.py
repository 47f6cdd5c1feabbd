"""The display of a run while it goes on, in a terminal or a notebook."""

from __future__ import annotations

import importlib
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.status import Status

from qlora_wgpu.cli._terminal import Terminal, in_notebook
from qlora_wgpu.report.page import inline
from qlora_wgpu.training import Observer, RunSetup, TrainResult, WorkerFigures
from qlora_wgpu.training.observers import Row, Written

# ---- in a notebook -------------------------------------------------------------------------------

# Seconds between two drawings, and how many times as long as one takes.
_SECONDS_BETWEEN, _SHARE = 1.0, 50


class NotebookCurves(Observer):
    """A run's curves in a notebook; needs no widgets, but a display handle of IPython alone."""

    def __init__(self) -> None:
        self._display: Any = importlib.import_module("IPython.display")
        self._handle: Any = None
        self._rows: list[Row] = []
        self._total, self._next = 0, 0.0

    def started(self, total_steps: int, done: int, memory: Counter[str]) -> None:
        """Takes the place below what has been printed."""
        self._total = total_steps
        self._handle = self._display.display(self._shown(), display_id=True)

    def step(self, row: Row) -> None:
        """Draws anew, now and then."""
        self._add(row)

    def evaluation(self, row: Row) -> None:
        """Draws anew, now and then."""
        self._add(row)

    def finished(self, result: TrainResult) -> None:
        """Draws all there is."""
        if self._handle is not None:
            self._handle.update(self._shown())

    def _add(self, row: Row) -> None:
        self._rows.append(row)
        began = time.monotonic()
        if self._handle is not None and began >= self._next:
            self._handle.update(self._shown())
            now = time.monotonic()
            self._next = now + max(_SECONDS_BETWEEN, _SHARE * (now - began))

    def _shown(self) -> Any:
        step = self._rows[-1]["step"] if self._rows else 0
        return self._display.HTML(inline(self._rows, f"step {step:,} of {self._total:,}"))


# ---- in a terminal -------------------------------------------------------------------------------

_PROMPT, _ANSWER = 72, 240  # characters of a text that are shown while training goes on
_SELDOM = 10  # steps between two lines about workers
_WORKERS = 8  # that a line shows
_KINDS = 44  # characters of a memory line's kinds, so that it fits into 80 columns


def memory_line(memory: Counter[str], place: str = "device") -> str:
    """Bytes on one line: all of them, and what takes most."""
    total = sum(memory.values())
    gibi = total >= 10 << 30
    unit, name = (2**30, "GiB") if gibi else (2**20, "MiB")
    shown = ""
    for kind, nbytes in memory.most_common():
        part = f"{', ' if shown else ''}{kind} {nbytes / unit:,.1f}"
        if nbytes < total / 100 or len(shown + part) > _KINDS:
            break
        shown += part
    return f"planned {place} memory {total / unit:,.1f} {name}: {shown}"


def host_line(memory: Counter[str], mapped: int) -> str:
    """What is taken of host memory, and what waits on disk, on one line."""
    on_disk = f"; weights on disk {mapped / 2**20:,.1f} MiB" if mapped else ""
    return memory_line(memory, "host") + on_disk


class Display(Observer):
    """A line for what should stay on the screen, a moving one for what is being done.

    It is entered before anything is told, so that no moving line outlives an error.
    """

    def __init__(self, console: Terminal) -> None:
        self._console = console
        # On a screen that both share, the moving line must know of it.
        is_shared = in_notebook() or (console.is_terminal and sys.stderr.isatty())
        self._errors = console if is_shared else Terminal(stderr=True, lasting=True)
        self._status: Status | None = None
        self._loading: Progress | None = None

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Takes away what moves."""
        self.activity("")
        if self._loading is not None and self._loading.live.is_started:
            self._loading.stop()
        self._loading = None

    def note(self, text: str) -> None:
        """Prints a line."""
        self._console.note(text)

    def warning(self, text: str) -> None:
        """Prints a line."""
        self._errors.warning(text)

    def activity(self, text: str) -> None:
        """Shows it with a spinner, until it is over."""
        if not text:
            if self._status is not None:
                self._status.stop()
            self._status = None
        elif self._status is None:
            self._status = self._console.status(text)
            self._status.start()
        else:
            self._status.update(text)

    def planned(self, memory: Counter[str]) -> None:
        """Prints a line."""
        self._console.print(memory_line(memory))

    def planned_on_host(self, memory: Counter[str], mapped: int) -> None:
        """Prints a line."""
        self._console.print(host_line(memory, mapped))

    def tuned(self, notes: Sequence[str]) -> None:
        """Prints a line."""
        self._console.print(f"kernels as timed on this GPU: {'; '.join(notes)}")

    def loading(self, name: str, done: int, total: int) -> None:
        """Moves a bar that goes when all is there."""
        if self._loading is None:
            columns = (
                TextColumn("loading weights"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
            )
            self._loading = Progress(
                *columns,
                console=self._console,
                transient=True,
                disable=not self._console.is_terminal,
            )
            self._loading.add_task("loading", total=total)
            self._loading.start()
        self._loading.update(self._loading.task_ids[0], completed=done)
        if done == total:
            self.stop()


class TrainingDisplay(Display):
    """Adds a progress bar with the latest figures.

    Where there is no terminal, there is a line for each logged step instead.
    """

    def __init__(self, console: Terminal) -> None:
        super().__init__(console)
        self._progress = Progress(
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("<"),
            TimeRemainingColumn(),
            console=console,
            disable=not (console.is_terminal or console.is_jupyter),
        )
        self._task: TaskID | None = None
        self._shown_at = 0
        self._every = 1
        self._workers: Sequence[WorkerFigures] = ()
        self._told_at = -_SELDOM

    def stop(self) -> None:
        """Takes away what moves; the bar stays as it is."""
        if self._progress.live.is_started:
            self._progress.stop()
        super().stop()

    def setup(self, setup: RunSetup) -> None:
        """Prints a table."""
        self._console.facts(_setup_rows(setup))

    def started(self, total_steps: int, done: int, memory: Counter[str]) -> None:
        """Begins the bar."""
        self._task = self._progress.add_task(
            "training", total=total_steps, completed=done, figures=""
        )
        self._shown_at = done
        self._every = 1 if self._progress.disable else max(1, total_steps // 10)
        self._progress.start()

    def resumed(self, checkpoint: Path, step: int) -> None:
        """Says where from."""
        self._console.print(f"goes on from {checkpoint.name}")

    def workers(self, workers: Sequence[WorkerFigures]) -> None:
        """Keeps them for the next line; one that is new or gone is shown at once."""
        names = {worker.name for worker in self._workers}
        if {worker.name for worker in workers} != names:
            self._shown_at, self._told_at = -self._every, -_SELDOM
        self._workers = workers

    def step(self, row: dict[str, Any]) -> None:
        """Moves the bar; now and then prints a line that stays."""
        if self._task is None:
            return
        loss = "no label" if row["loss"] is None else f"loss {row['loss']:.4f}"
        loss += _answers(row)
        speed = f"{row['tokens_per_second']:,.0f} tok/s"
        if self._workers:
            speed += f" on {sum(worker.answers for worker in self._workers)}"
        self._progress.update(
            self._task,
            completed=row["step"],
            figures=f"{loss}  lr {row['learning_rate']:.1e}  {speed}",
        )
        if row["step"] == 1 or row["step"] - self._shown_at >= self._every:
            self._shown_at = row["step"]
            norm, rate = f"grad norm {row['grad_norm']:.3f}", f"lr {row['learning_rate']:.2e}"
            hits = row.get("mean_token_accuracy")
            learnt = loss if hits is None else f"{loss}  acc {hits:.1%}"
            self._print_what_fits([f"step {row['step']:>5}", learnt, norm, rate, speed])
            if self._workers and row["step"] - self._told_at >= _SELDOM:
                self._told_at = row["step"]
                self._console.print(_workers_line(self._workers))

    def _print_what_fits(self, parts: list[str]) -> None:
        """Prints a line, on a narrow screen without its last parts, which the bar shows, too."""
        while len(parts) > 2 and len("  ".join(parts)) > self._console.width:
            parts.pop()
        self._console.print("  ".join(parts))

    def activity(self, text: str) -> None:
        """Shows it on the bar, if there is one."""
        if self._task is not None and self._progress.live.is_started:
            self._progress.update(self._task, figures=text)
        else:
            super().activity(text)

    def evaluation(self, row: dict[str, Any]) -> None:
        """Prints a line that stays."""
        line = f"step {row['step']:>5}  held-out loss {row['eval_loss']:.4f}"
        line += _answers(row, "eval_")
        if (hits := row.get("eval_mean_token_accuracy")) is not None:
            line += f"  token accuracy {hits:.1%}"
        self._console.print(line, style="bold")

    def written(self, step: int, texts: Sequence[Written]) -> None:
        """Prints each in two lines: the prompt's end, and what follows it."""
        self._console.print(f"step {step:>5}  texts", style="bold")
        for each in texts:
            prompt, text = " ".join(each.prompt.split()), " ".join(each.text.split())
            shown = prompt if len(prompt) <= _PROMPT else f"…{prompt[-_PROMPT:]}"
            said = text if len(text) <= _ANSWER else f"{text[:_ANSWER]}…"
            self._console.print(f"  {shown}", style="dim")
            self._console.print(f"    {said or '(nothing)'}")

    def finished(self, result: TrainResult) -> None:
        """Stops the bar."""
        self.stop()


def _answers(row: dict[str, Any], prefix: str = "") -> str:
    """How far apart the rewards of good and bad answers are, and how often the right way round."""
    margin, share = row.get(f"{prefix}rewards/margins"), row.get(f"{prefix}rewards/accuracies")
    text = "" if margin is None else f"  margin {margin:.3f}"
    return text if share is None else f"{text}  right {share:.0%}"


def _workers_line(workers: Sequence[WorkerFigures]) -> str:
    """Each worker's share of the tokens and its speed; of many, the first ones'."""
    total = sum(worker.tokens for worker in workers)
    parts = []
    for worker in workers[:_WORKERS]:
        share = f"{worker.tokens / total:.0%}" if total else "nothing"
        speed = worker.tokens_per_second
        fast = "" if speed is None else f" at {speed:,.0f} tok/s"
        parts.append(f"{worker.name} {share}{fast}" if worker.answers else f"{worker.name} silent")
    more = f" and {len(workers) - _WORKERS} more" if len(workers) > _WORKERS else ""
    return f"            workers: {', '.join(parts)}{more}"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def _setup_rows(setup: RunSetup) -> dict[str, str]:
    rows = {
        "device": setup.device,
        "base": f"{setup.base} ({setup.scheme}, {setup.compute_dtype})",
        "adapter": f"r {setup.rank} on {setup.adapted_layers} layers: "
        f"{setup.adapter_parameters:,} parameters",
        "training data": f"{setup.train_rows:,} rows, {setup.train_tokens:,} learnt tokens",
        "step": f"{_count(setup.batch_size, 'row')} × "
        f"{_count(setup.accumulation, 'micro-batch', 'es')}",
    }
    for each in setup.sources:
        share = each.rows / max(setup.train_rows, 1)
        rows[f"  {each.name}"] = (
            f"{each.rows:,} of {each.of:,} rows ({share:.1%}), {each.tokens:,} learnt tokens"
        )
    if setup.eval_rows is not None:
        rows["held-out data"] = f"{setup.eval_rows:,} rows, {setup.eval_tokens:,} tokens"
    return rows
