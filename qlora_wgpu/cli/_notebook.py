"""The curves of a run in a notebook, drawn anew in their place while it goes on."""

from __future__ import annotations

import importlib
import time
from collections import Counter
from typing import Any

from qlora_wgpu.report.page import inline
from qlora_wgpu.training import Observer, TrainResult
from qlora_wgpu.training.observer import Row

_SELDOM, _SHARE = 1.0, 50  # seconds between two drawings, and how often as long as one takes


class NotebookCurves(Observer):
    """Needs no widgets: a display handle of IPython alone."""

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
            self._next = now + max(_SELDOM, _SHARE * (now - began))

    def _shown(self) -> Any:
        step = self._rows[-1]["step"] if self._rows else 0
        return self._display.HTML(inline(self._rows, f"step {step:,} of {self._total:,}"))
