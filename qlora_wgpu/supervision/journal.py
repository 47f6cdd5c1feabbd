"""What a supervised process leaves for its supervisor: files in a folder that only they know."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_VARIABLE = "QLORA_WGPU_SUPERVISOR"  # "process id:folder", for the next process alone


@dataclass(frozen=True)
class CutFile:
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

    @property
    def _checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def _opened(self) -> Path:
        return self.folder / "opened"

    @property
    def _under_way(self) -> Path:
        return self.folder / "under_way"

    @property
    def _done(self) -> Path:
        return self.folder / "done"

    @property
    def _mapped(self) -> Path:
        return self.folder / "mapped"

    def environment(self) -> dict[str, str]:
        """The variables that hand the journal to a process."""
        return {**os.environ, _VARIABLE: f"{self.supervisor}:{self.folder}"}

    @classmethod
    def inherited(cls) -> Journal | None:
        """The journal handed to this process; None if nobody supervises it."""
        supervisor, colon, folder = os.environ.pop(_VARIABLE, "").partition(":")
        return cls(int(supervisor), Path(folder)) if colon and supervisor.isdigit() else None

    def note_done(self) -> None:
        """Notes that the command has done all that it was to do."""
        self._done.touch()

    def take_done(self) -> bool:
        """Whether a process has noted that, once."""
        is_done = self._done.exists()
        self._done.unlink(missing_ok=True)
        return is_done

    def note_opened(self) -> None:
        """Notes that the run's folder is this run's own."""
        self._opened.touch()

    def note_checkpoint(self, folder: Path) -> None:
        """Notes a checkpoint that is whole."""
        with self._checkpoints.open("a", encoding="utf-8") as file:
            file.write(f"{folder}\n")

    def note_under_way(self, doing: str) -> None:
        """Notes what the driver is tried at; nothing, if that is empty."""
        self._under_way.write_text(doing, encoding="utf-8")

    def take_under_way(self) -> str:
        """What a process was trying as it ended, once."""
        try:
            return self._under_way.read_text(encoding="utf-8")
        except OSError:
            return ""
        finally:
            self._under_way.unlink(missing_ok=True)

    def note_mapped(self, path: str, size: int) -> None:
        """Notes a file that is read through a map, and its size."""
        with self._mapped.open("a", encoding="ascii") as file:
            file.write(json.dumps([path, size]) + "\n")

    def cut_files(self) -> list[CutFile]:
        """The mapped files that have become shorter."""
        if not self._mapped.exists():
            return []
        cut = []
        for path, size in map(json.loads, self._mapped.read_text("ascii").splitlines()):
            with suppress(OSError):
                left = Path(path).stat().st_size
                if left < size:
                    cut.append(CutFile(path, left, size))
        return cut

    @property
    def has_opened(self) -> bool:
        """Whether the run had begun to write its folder."""
        return self._opened.exists()

    def checkpoints(self) -> list[str]:
        """The checkpoints noted so far, over all processes."""
        if not self._checkpoints.exists():
            return []
        return self._checkpoints.read_text(encoding="utf-8").splitlines()

    def last_words(self) -> str:
        """Why a native library gave up, as far as it said so."""
        if not self.driver_log.exists():
            return ""
        text = self.driver_log.read_text(encoding="utf-8", errors="replace")
        _, panicked, rest = text.rpartition("panicked at")
        lines = rest.partition("stack backtrace:")[0].splitlines()[1:] if panicked else []
        said = [line.strip() for line in lines if line.strip() and not line.startswith("note:")]
        return said[-1] if said else ""
