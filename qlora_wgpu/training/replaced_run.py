"""A run that is to be replaced stays in ``replaced/`` until its successor has something to show."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qlora_wgpu.checkpoint import remove, settle
from qlora_wgpu.presence import exists

REPLACED = "replaced"
_CONFIG = "config.yaml"


class Replaced:
    """Moves a run aside, part by part, so that a kill in between loses nothing.

    config.yaml goes first and comes back last. So a folder without it, beside parts that were
    moved, is one where the successor never began, and ``settle`` brings everything back.
    """

    def __init__(self, run: Path, parts: Sequence[str]) -> None:
        """Takes a run's folder and the names that a run writes in it."""
        self._run = run
        self._parts = [_CONFIG, *(part for part in parts if part != _CONFIG)]
        self.path = run / REPLACED

    def move_aside(self) -> None:
        """Moves everything that the run has written.

        Raises:
            CheckpointError: If what was moved aside before cannot be removed.
            OSError: If something cannot be moved.
        """
        self.remove()
        self.path.mkdir()
        for part in self._parts:
            if exists(self._run / part):
                (self._run / part).rename(self.path / part)

    def settle(self) -> None:
        """Brings back what was moved for a successor that has not begun.

        Raises:
            CheckpointError: If that is impossible.
            OSError: If something cannot be moved.
        """
        settle(self.path)
        if not exists(self.path) or exists(self._run / _CONFIG):
            return
        for part in reversed(self._parts):
            if exists(self.path / part) and not exists(self._run / part):
                (self.path / part).rename(self._run / part)
        remove(self.path)

    def remove(self) -> None:
        """Removes what was moved aside; nothing where there is none.

        Raises:
            CheckpointError: If it cannot be removed.
        """
        remove(self.path)
