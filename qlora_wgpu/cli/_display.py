"""How a run is shown while it goes on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from qlora_wgpu.training import Observer


def memory_line(title: str, memory: Counter[str]) -> Text:
    """Bytes by kind on one line, the largest first."""
    parts = [f"{kind} {nbytes / 2**20:,.1f}" for kind, nbytes in memory.most_common() if nbytes]
    return Text(
        f"{title} device memory {sum(memory.values()) / 2**20:,.1f} MiB: {', '.join(parts)}"
    )


class Display(Observer):
    """A progress bar with the latest figures, and a line for what should stay on the screen."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("<"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task: TaskID | None = None
        self._shown_at = 0

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def started(self, total_steps: int, done: int, memory: Counter[str]) -> None:
        """Begins the bar."""
        self._console.print(memory_line("taken", memory))
        self._task = self._progress.add_task(
            "training", total=total_steps, completed=done, figures=""
        )
        self._shown_at = done
        self._every = max(1, total_steps // 10)
        self._progress.start()

    def resumed(self, checkpoint: Path, step: int) -> None:
        """Says where from."""
        self._console.print(f"goes on from {checkpoint.name}", highlight=False)

    def step(self, row: dict[str, Any]) -> None:
        """Moves the bar; now and then prints a line that stays."""
        if self._task is None:
            return
        loss = "no label" if row["loss"] is None else f"loss {row['loss']:.4f}"
        speed = f"{row['tokens_per_second']:,.0f} tok/s"
        self._progress.update(
            self._task,
            completed=row["step"],
            figures=f"{loss}  lr {row['learning_rate']:.1e}  {speed}",
        )
        if row["step"] == 1 or row["step"] - self._shown_at >= self._every:
            self._shown_at = row["step"]
            self._progress.console.print(
                f"step {row['step']:>5}  {loss}  grad norm {row['grad_norm']:.3f}  "
                f"lr {row['learning_rate']:.2e}  {speed}",
                highlight=False,
            )

    def evaluation(self, row: dict[str, Any]) -> None:
        """Prints a line that stays."""
        self._progress.console.print(
            f"step {row['step']:>5}  held-out loss {row['eval_loss']:.4f}",
            style="bold",
            highlight=False,
        )

    def warning(self, text: str) -> None:
        """Prints a line that stays."""
        self._progress.console.print(f"warning: {text}", style="yellow", highlight=False)
