"""The supervised process: its journal for the supervisor, its native output, and its end.

A journal is files in a folder that only the two processes know.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qlora_wgpu.supervision.processes import HUNG

# ---- the journal ---------------------------------------------------------------------------------

_VARIABLE = "QLORA_WGPU_SUPERVISOR"  # "process id:folder", for the next process alone


@dataclass(frozen=True)
class TruncatedFile:
    """A file that became shorter while it was mapped; its text starts a sentence."""

    path: str
    left: int  # bytes it has now
    size: int  # bytes it had

    def __str__(self) -> str:
        return (
            f"{self.path} was truncated while it was read: {self.left:,} of {self.size:,} bytes "
            "are left; copy or download it again"
        )


@dataclass(frozen=True)
class Journal:
    """What a process notes for its supervisor."""

    supervisor: int  # the supervisor's process id
    folder: Path

    @property
    def driver_log(self) -> Path:
        """What native libraries wrote to standard error."""
        return self.folder / "driver.log"

    def environment(self) -> dict[str, str]:
        """The environment that passes the journal to a process."""
        return {**os.environ, _VARIABLE: f"{self.supervisor}:{self.folder}"}

    @classmethod
    def inherited(cls) -> Journal | None:
        """The journal passed to this process; None if it has no supervisor."""
        supervisor, colon, folder = os.environ.pop(_VARIABLE, "").partition(":")
        return cls(int(supervisor), Path(folder)) if colon and supervisor.isdigit() else None

    def _note(self, kind: str, value: Any = True) -> None:
        with (self.folder / kind).open("a", encoding="ascii") as file:
            file.write(json.dumps(value) + "\n")

    def _noted(self, kind: str) -> list[Any]:
        file = self.folder / kind
        return [*map(json.loads, file.read_text("ascii").splitlines())] if file.exists() else []

    # -- written by the process ----------------------------------------------------------------

    def note_done(self) -> None:
        """Notes that the command has completed."""
        self._note("done")

    def note_opened(self) -> None:
        """Notes that the run has started to write its folder."""
        self._note("opened")

    def note_checkpoint(self, folder: Path) -> None:
        """Notes a complete checkpoint."""
        self._note("checkpoints", str(folder))

    def note_under_way(self, doing: str) -> None:
        """Notes what the driver is doing; an empty text for nothing."""
        self._note("under_way", doing)

    def note_mapped(self, path: str, size: int) -> None:
        """Notes a memory-mapped file and its size."""
        self._note("mapped", [path, size])

    # -- read by its supervisor ----------------------------------------------------------------

    def forget_process(self) -> None:
        """Deletes the notes about one process, before the next one starts."""
        for kind in ("done", "under_way"):
            (self.folder / kind).unlink(missing_ok=True)

    @property
    def is_done(self) -> bool:
        """Whether the command has completed."""
        return bool(self._noted("done"))

    @property
    def has_opened(self) -> bool:
        """Whether the run has started to write its folder."""
        return bool(self._noted("opened"))

    def under_way(self) -> str:
        """What the driver was doing when the process ended."""
        return str(["", *self._noted("under_way")][-1])

    def checkpoints(self) -> list[str]:
        """The checkpoints of all processes so far."""
        return self._noted("checkpoints")

    def truncated_files(self) -> list[TruncatedFile]:
        """The mapped files that have become shorter."""
        truncated = []
        for path, size in self._noted("mapped"):
            with suppress(OSError):
                left = Path(path).stat().st_size
                if left < size:
                    truncated.append(TruncatedFile(path, left, size))
        return truncated

    def panic_message(self) -> str:
        """The last message of a native library that panicked; empty if there is none."""
        if not self.driver_log.exists():
            return ""
        text = self.driver_log.read_text(encoding="utf-8", errors="replace")
        _, panicked, rest = text.rpartition("panicked at")
        lines = rest.partition("stack backtrace:")[0].splitlines()[1:] if panicked else []
        message = [line.strip() for line in lines if line.strip() and not line.startswith("note:")]
        return message[-1] if message else ""


# ---- the process ---------------------------------------------------------------------------------

_POLL_SECONDS = 0.5
_SYNCHRONIZE, _INFINITE = 0x0010_0000, 0xFFFF_FFFF  # of Windows' process handles


def begin(journal: Journal) -> None:
    """Makes this process a supervised one; called before anything native is loaded."""
    _redirect_native_stderr(journal)
    threading.Thread(target=_end_with, args=(journal.supervisor,), daemon=True).start()


def end_if_hung(overdue: Callable[[], str | None]) -> None:
    """Ends the process when a call into the driver takes too long, as ``overdue`` says.

    Nothing else can be done: the call does not return, and no exception reaches it.
    """
    threading.Thread(target=_end_when, args=(overdue,), daemon=True).start()


def _redirect_native_stderr(journal: Journal) -> None:
    """Sends what native code writes to standard error to a file; Python's output is unchanged."""
    sys.stderr.flush()
    own = os.dup(2)
    log = os.open(journal.driver_log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 2)
    os.close(log)
    encoding, errors = sys.stderr.encoding, sys.stderr.errors
    sys.stderr = os.fdopen(own, "w", buffering=1, encoding=encoding, errors=errors)


def _end_with(supervisor: int) -> None:
    if sys.platform == "win32":
        kernel = ctypes.windll.kernel32
        kernel.WaitForSingleObject(kernel.OpenProcess(_SYNCHRONIZE, False, supervisor), _INFINITE)
        signal.raise_signal(signal.SIGTERM)
        return
    while os.getppid() == supervisor:
        time.sleep(_POLL_SECONDS)
    # The main thread is the one that sleeps.
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def _end_when(overdue: Callable[[], str | None]) -> None:
    while (what := overdue()) is None:
        time.sleep(_POLL_SECONDS)
    os.write(2, f"panicked at\n{what}\n".encode())
    os._exit(HUNG)
