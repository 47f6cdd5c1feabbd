"""What a supervised process leaves for its supervisor: files in a folder that only they know."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_VARIABLE = "QLORA_WGPU_SUPERVISOR"  # "process id:folder", for the next process alone


@dataclass(frozen=True)
class TruncatedFile:
    """A file that was cut while it was mapped; as a text, the beginning of a sentence."""

    path: str  # the file
    left: int  # its bytes
    size: int  # how many it had

    def __str__(self) -> str:
        return (
            f"{self.path} was cut while it was read: {self.left:,} of {self.size:,} bytes are "
            "left; copy or download it again"
        )


@dataclass(frozen=True)
class Journal:
    """The folder between a supervisor and its process."""

    supervisor: int  # the supervisor's process id
    folder: Path  # where the files are

    @property
    def driver_log(self) -> Path:
        """What native libraries wrote to standard error."""
        return self.folder / "driver.log"

    def environment(self) -> dict[str, str]:
        """The variables that hand the journal to a process."""
        return {**os.environ, _VARIABLE: f"{self.supervisor}:{self.folder}"}

    @classmethod
    def inherited(cls) -> Journal | None:
        """The journal handed to this process; None if nobody supervises it."""
        supervisor, colon, folder = os.environ.pop(_VARIABLE, "").partition(":")
        return cls(int(supervisor), Path(folder)) if colon and supervisor.isdigit() else None

    def _note(self, kind: str, value: Any = True) -> None:
        with (self.folder / kind).open("a", encoding="ascii") as file:
            file.write(json.dumps(value) + "\n")

    def _noted(self, kind: str) -> list[Any]:
        file = self.folder / kind
        return [*map(json.loads, file.read_text("ascii").splitlines())] if file.exists() else []

    # -- a process notes -----------------------------------------------------------------------

    def note_done(self) -> None:
        """Notes that the command has done all that it was to do."""
        self._note("done")

    def note_opened(self) -> None:
        """Notes that the run's folder is this run's own."""
        self._note("opened")

    def note_checkpoint(self, folder: Path) -> None:
        """Notes a checkpoint that is whole."""
        self._note("checkpoints", str(folder))

    def note_under_way(self, doing: str) -> None:
        """Notes what the driver is tried at; nothing, if that is empty."""
        self._note("under_way", doing)

    def note_mapped(self, path: str, size: int) -> None:
        """Notes a file that is read through a map, and its size."""
        self._note("mapped", [path, size])

    # -- its supervisor reads ------------------------------------------------------------------

    def forget_process(self) -> None:
        """Begins anew with what concerns one process alone."""
        for kind in ("done", "under_way"):
            (self.folder / kind).unlink(missing_ok=True)

    @property
    def is_done(self) -> bool:
        """Whether the process has done all that it was to do."""
        return bool(self._noted("done"))

    @property
    def has_opened(self) -> bool:
        """Whether the run had begun to write its folder."""
        return bool(self._noted("opened"))

    def under_way(self) -> str:
        """What the process was trying as it ended."""
        return str(["", *self._noted("under_way")][-1])

    def checkpoints(self) -> list[str]:
        """The checkpoints noted so far, over all processes."""
        return self._noted("checkpoints")

    def cut_files(self) -> list[TruncatedFile]:
        """The mapped files that have become shorter."""
        cut = []
        for path, size in self._noted("mapped"):
            with suppress(OSError):
                left = Path(path).stat().st_size
                if left < size:
                    cut.append(TruncatedFile(path, left, size))
        return cut

    def last_words(self) -> str:
        """Why a native library gave up, as far as it said so."""
        if not self.driver_log.exists():
            return ""
        text = self.driver_log.read_text(encoding="utf-8", errors="replace")
        _, panicked, rest = text.rpartition("panicked at")
        lines = rest.partition("stack backtrace:")[0].splitlines()[1:] if panicked else []
        said = [line.strip() for line in lines if line.strip() and not line.startswith("note:")]
        return said[-1] if said else ""
