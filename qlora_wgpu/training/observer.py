"""What a run tells whoever watches it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Observer:
    """Does nothing; a progress bar or a logger overrides what it wants to know."""

    def started(self, total_steps: int, done: int, memory: Counter[str]) -> None:
        """The run is about to begin or go on; ``memory`` is the plan, bytes by kind."""

    def resumed(self, checkpoint: Path, step: int) -> None:
        """A run goes on after ``step`` steps."""

    def step(self, row: Row) -> None:
        """A step's row of metrics.jsonl."""

    def evaluation(self, row: Row) -> None:
        """An evaluation's row of metrics.jsonl."""

    def saved(self, folder: Path) -> None:
        """A checkpoint or the adapter was written."""

    def warning(self, text: str) -> None:
        """Something the user should know of, which does not end the run."""
