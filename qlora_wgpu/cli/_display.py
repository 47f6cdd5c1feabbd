"""The live display of a run, in a terminal or a notebook."""

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
from qlora_wgpu.training import Observer, RunSetup, TrainResult, WorkerMetrics
from qlora_wgpu.training.observers import Row, Written

# ---- in a notebook -------------------------------------------------------------------------------

# Minimum seconds between two drawings, and how many times as long as a drawing takes
_MIN_SECONDS, _TIMES_DRAWING = 1.0, 50


class NotebookCurves(Observer):
    """A run's curves in a notebook, through IPython's display handle, without widgets."""

    def __init__(self) -> None:
        self._display: Any = importlib.import_module("IPython.display")
        self._handle: Any = None
        self._rows: list[Row] = []
        self._total, self._next = 0, 0.0

    def started(self, total_steps: int, done: int, memory: Counter[str]) -> None:
        """Adds the curves below the output so far."""
        self._total = total_steps
        self._handle = self._display.display(self._shown(), display_id=True)

    def step(self, row: Row) -> None:
        """Redraws, if it is time."""
        self._add(row)

    def evaluation(self, row: Row) -> None:
        """Redraws, if it is time."""
        self._add(row)

    def finished(self, result: TrainResult) -> None:
        """Redraws."""
        if self._handle is not None:
            self._handle.update(self._shown())

    def _add(self, row: Row) -> None:
        self._rows.append(row)
        began = time.monotonic()
        if self._handle is not None and began >= self._next:
            self._handle.update(self._shown())
            now = time.monotonic()
            self._next = now + max(_MIN_SECONDS, _TIMES_DRAWING * (now - began))

    def _shown(self) -> Any:
        step = self._rows[-1]["step"] if self._rows else 0
        return self._display.HTML(inline(self._rows, f"step {step:,} of {self._total:,}"))


# ---- in a terminal -------------------------------------------------------------------------------

_PROMPT_WIDTH, _TEXT_WIDTH = 72, 240  # characters of a sample that are shown during training
_WORKER_STEPS = 10  # steps between two lines about workers
_MAX_WORKERS = 8  # on a line
_KINDS_CHARACTERS = 44  # of a memory line, so that it fits into 80 columns


def memory_line(memory: Counter[str], place: str = "device") -> str:
    """One line with the total and the largest kinds."""
    total = sum(memory.values())
    gibi = total >= 10 << 30
    unit, name = (2**30, "GiB") if gibi else (2**20, "MiB")
    shown = ""
    for kind, nbytes in memory.most_common():
        part = f"{', ' if shown else ''}{kind} {nbytes / unit:,.1f}"
        if nbytes < total / 100 or len(shown + part) > _KINDS_CHARACTERS:
            break
        shown += part
    return f"planned {place} memory {total / unit:,.1f} {name}: {shown}"


def host_line(memory: Counter[str], mapped: int) -> str:
    """One line about host memory, and weights that are read from disk."""
    on_disk = f"; weights on disk {mapped / 2**20:,.1f} MiB" if mapped else ""
    return memory_line(memory, "host") + on_disk


class Display(Observer):
    """Prints events as lines, and the current activity as a spinner or bar.

    It must be entered before events arrive, so that an error removes the spinner.
    """

    def __init__(self, console: Terminal) -> None:
        self._console = console
        # Where stdout and stderr share a screen, the live line must know of both.
        is_shared = in_notebook() or (console.is_terminal and sys.stderr.isatty())
        self._errors = console if is_shared else Terminal(stderr=True, ignore_errors=True)
        self._status: Status | None = None
        self._loading: Progress | None = None

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Removes the spinner and the bar."""
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
        """Shows it with a spinner; an empty text removes it."""
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
        self._console.print(f"autotuned kernels: {'; '.join(notes)}")

    def loading(self, name: str, done: int, total: int) -> None:
        """Updates a bar, which disappears at the end."""
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
    """Adds a progress bar with the latest metrics; without a terminal, a line per logged step."""

    def __init__(self, console: Terminal) -> None:
        super().__init__(console)
        self._progress = Progress(
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TextColumn("{task.fields[metrics]}"),
            TimeElapsedColumn(),
            TextColumn("<"),
            TimeRemainingColumn(),
            console=console,
            disable=not (console.is_terminal or console.is_jupyter),
        )
        self._task: TaskID | None = None
        self._shown_at = 0
        self._every = 1
        self._workers: Sequence[WorkerMetrics] = ()
        self._workers_shown_at = -_WORKER_STEPS

    def stop(self) -> None:
        """Removes the spinner and stops the bar."""
        if self._progress.live.is_started:
            self._progress.stop()
        super().stop()

    def setup(self, setup: RunSetup) -> None:
        """Prints a table."""
        self._console.facts(_setup_rows(setup))

    def started(self, total_steps: int, done: int, memory: Counter[str]) -> None:
        """Starts the bar."""
        self._task = self._progress.add_task(
            "training", total=total_steps, completed=done, metrics=""
        )
        self._shown_at = done
        self._every = 1 if self._progress.disable else max(1, total_steps // 10)
        self._progress.start()

    def resumed(self, checkpoint: Path, step: int) -> None:
        """Prints a line."""
        self._console.print(f"resumed from {checkpoint.name}")

    def workers(self, workers: Sequence[WorkerMetrics]) -> None:
        """Keeps them for the next line, which follows at once if one joined or left."""
        names = {worker.name for worker in self._workers}
        if {worker.name for worker in workers} != names:
            self._shown_at, self._workers_shown_at = -self._every, -_WORKER_STEPS
        self._workers = workers

    def step(self, row: dict[str, Any]) -> None:
        """Updates the bar, and prints a line now and then."""
        if self._task is None:
            return
        loss = "no labels" if row["loss"] is None else f"loss {row['loss']:.4f}"
        if (reward := row.get("reward")) is not None:
            loss = f"reward {reward:.4f}  length {row['completions/mean_length']:.1f}"
        loss += _rewards(row)
        speed = f"{row['tokens_per_second']:,.0f} tok/s"
        if self._workers:
            speed += f" on {sum(worker.answers for worker in self._workers)}"
        self._progress.update(
            self._task,
            completed=row["step"],
            metrics=f"{loss}  lr {row['learning_rate']:.1e}  {speed}",
        )
        if row["step"] == 1 or row["step"] - self._shown_at >= self._every:
            self._shown_at = row["step"]
            norm, rate = f"grad norm {row['grad_norm']:.3f}", f"lr {row['learning_rate']:.2e}"
            hits = row.get("mean_token_accuracy")
            quality = loss if hits is None else f"{loss}  acc {hits:.1%}"
            self._print_fitting([f"step {row['step']:>5}", quality, norm, rate, speed])
            if self._workers and row["step"] - self._workers_shown_at >= _WORKER_STEPS:
                self._workers_shown_at = row["step"]
                self._console.print(_workers_line(self._workers))

    def _print_fitting(self, parts: list[str]) -> None:
        """Prints a line, on a narrow screen without its last parts, which the bar shows."""
        while len(parts) > 2 and len("  ".join(parts)) > self._console.width:
            parts.pop()
        self._console.print("  ".join(parts))

    def activity(self, text: str) -> None:
        """Shows it on the bar or with a spinner."""
        if self._task is not None and self._progress.live.is_started:
            self._progress.update(self._task, metrics=text)
        else:
            super().activity(text)

    def evaluation(self, row: dict[str, Any]) -> None:
        """Prints a line."""
        held_out = f"held-out loss {row['eval_loss']:.4f}"
        if (reward := row.get("eval_reward")) is not None:
            held_out = f"held-out reward {reward:.4f}"
        line = f"step {row['step']:>5}  {held_out}"
        line += _rewards(row, "eval_")
        if (hits := row.get("eval_mean_token_accuracy")) is not None:
            line += f"  token accuracy {hits:.1%}"
        self._console.print(line, style="bold")

    def written(self, step: int, texts: Sequence[Written]) -> None:
        """Prints each sample in two lines: the end of the prompt, and the generated text."""
        self._console.print(f"step {step:>5}  samples", style="bold")
        for each in texts:
            prompt, text = " ".join(each.prompt.split()), " ".join(each.text.split())
            shown = prompt if len(prompt) <= _PROMPT_WIDTH else f"…{prompt[-_PROMPT_WIDTH:]}"
            answer = text if len(text) <= _TEXT_WIDTH else f"{text[:_TEXT_WIDTH]}…"
            self._console.print(f"  {shown}", style="dim")
            self._console.print(f"    {answer or '(empty)'}")

    def finished(self, result: TrainResult) -> None:
        """Stops the bar."""
        self.stop()


def _rewards(row: dict[str, Any], prefix: str = "") -> str:
    """Reward margin and accuracy of answers, and the metrics of scored sequences."""
    margin, accuracy = row.get(f"{prefix}rewards/margins"), row.get(f"{prefix}rewards/accuracies")
    parts = [] if margin is None else [f"margin {margin:.3f}"]
    parts += [] if accuracy is None else [f"accuracy {accuracy:.0%}"]
    if parts:
        return f"  rewards: {', '.join(parts)}"
    shown = {"accuracy": "{:.0%}", "macro_f1": "{:.3f}", "margin": "{:.3f}", "mae": "{:.3f}"}
    for name, form in shown.items():
        if (value := row.get(f"{prefix}{name}")) is not None:
            parts.append(f"{name.replace('_', ' ')} {form.format(value)}")
    return f"  {', '.join(parts)}" if parts else ""


def _workers_line(workers: Sequence[WorkerMetrics]) -> str:
    """Each worker's share of the tokens and its speed."""
    total = sum(worker.tokens for worker in workers)
    parts = []
    for worker in workers[:_MAX_WORKERS]:
        share = f"{worker.tokens / total:.0%}" if total else "0%"
        speed = worker.tokens_per_second
        fast = "" if speed is None else f" at {speed:,.0f} tok/s"
        parts.append(
            f"{worker.name} {share}{fast}" if worker.answers else f"{worker.name} no response"
        )
    more = f" and {len(workers) - _MAX_WORKERS} more" if len(workers) > _MAX_WORKERS else ""
    return f"            workers: {', '.join(parts)}{more}"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def _setup_rows(setup: RunSetup) -> dict[str, str]:
    rows = {
        "device": setup.device,
        "base": f"{setup.base} ({setup.scheme}, {setup.compute_dtype})",
        "adapter": f"r {setup.rank} on {setup.adapted_layers} layers: "
        f"{setup.adapter_parameters:,} parameters",
        "training data": f"{setup.train_rows:,} rows, {setup.train_tokens:,} label tokens",
        "step": f"{_count(setup.batch_size, 'row')} × "
        f"{_count(setup.accumulation, 'micro-batch', 'es')}",
    }
    for each in setup.sources:
        share = each.rows / max(setup.train_rows, 1)
        rows[f"  {each.name}"] = (
            f"{each.rows:,} of {each.of:,} rows ({share:.1%}), {each.tokens:,} label tokens"
        )
    if setup.eval_rows is not None:
        rows["held-out data"] = f"{setup.eval_rows:,} rows, {setup.eval_tokens:,} tokens"
    return rows
