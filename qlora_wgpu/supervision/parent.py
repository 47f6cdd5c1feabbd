"""The supervising process: it starts a command, passes signals on, and explains a crash.

A training run resumes from its latest checkpoint, each time with shorter GPU submits. A cluster
worker restarts. Only the standard library and click are imported here, so that it stays small.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import click

from qlora_wgpu.errors import ERROR, LOST
from qlora_wgpu.supervision.child import Journal
from qlora_wgpu.supervision.processes import (
    DEBOUNCE_SECONDS,
    HUNG,
    MORE_MEMORY,
    RESTART,
    address_space,
    block_signals,
    container_limit,
    crash_name,
    is_pending,
    signal_name,
)
from qlora_wgpu.supervision.streams import best_effort

# Milliseconds of a submit in the attempts after a crash: drivers kill work that takes too long.
_SMALLER_SUBMITS = (25, 5, 1)
# Commands that open a GPU, list GPUs, or map weights, which others may truncate meanwhile.
_SUPERVISED = frozenset(
    ("bench", "chat", "classify", "data", "doctor", "estimate", "eval", "export", "generate",
     "merge", "quantize", "serve", "train", "web", "worker")
)  # fmt: skip
_HELP = (["--help"], ["-h"])
# A worker that crashes within so many seconds, so many times in a row, is not restarted
_QUICK_CRASH_SECONDS, _MAX_QUICK_CRASHES = 60.0, 5
_ADVICE = (
    "update the driver, choose another GPU or backend (device.gpu, device.backend), or run "
    "`qlora-wgpu doctor --check`"
)


def supervise(arguments: Sequence[str]) -> int | None:
    """Runs a command in a process of its own: its exit code, or None if it needs no process."""
    if (problem := _missing_folder()) is not None:
        return _give_up(problem)
    if not arguments or arguments[0] not in _SUPERVISED or [*arguments[1:]] in _HELP:
        return None
    with tempfile.TemporaryDirectory(prefix="qlora-wgpu-", ignore_cleanup_errors=True) as folder:
        journal = Journal(os.getpid(), Path(folder))
        if arguments[0] == "train":
            return _run_training(tuple(arguments), journal)
        if arguments[0] == "worker":
            return _run_worker(arguments, journal)
        ended = _attempt(arguments, journal, own_group=False)
        return ended if isinstance(ended, int) else _give_up(f"{ended}: {_advice()}")


def _missing_folder() -> str | None:
    """The error for a folder that every command needs and that does not exist."""
    try:
        Path.cwd()
    except OSError as err:
        return f"the working directory cannot be used ({err.strerror}): change to another"
    try:
        tempfile.gettempdir()
    except OSError:
        return "no folder for temporary files is writable: set TMPDIR to one that is"
    return None


# ---- attempts ------------------------------------------------------------------------------------


def _run_training(arguments: tuple[str, ...], journal: Journal) -> int:
    """Runs and resumes a training run until it ends, or makes no progress."""
    checkpoints, attempt, now = 0, 0, arguments
    while isinstance(ended := _attempt(now, journal), str):
        saved = journal.checkpoints()
        if len(set(saved)) > checkpoints:  # it got further than before
            checkpoints, attempt = len(set(saved)), 0
        if attempt == len(_SMALLER_SUBMITS):
            kept = f"{kept}; " if (kept := _kept_checkpoint(journal)) else ""
            return _give_up(f"{ended}, {attempt + 1} times in a row: {kept}{_advice()}")
        smaller = f"device.submit_milliseconds={_SMALLER_SUBMITS[attempt]}"
        attempt += 1
        now = _next_arguments(arguments, journal, smaller)
        how = f"resuming from {saved[-1]}" if saved else "restarting from the beginning"
        _print(f"note: {ended}; {how} with {smaller}")
    return ended


def _next_arguments(arguments: tuple[str, ...], journal: Journal, smaller: str) -> tuple[str, ...]:
    """The arguments of an attempt that continues where the one before ended."""
    own = (*(a for a in arguments if a not in ("--overwrite", "--resume")), smaller)
    if journal.checkpoints() or "--resume" in arguments:
        return (*own, "--resume")
    # Without a checkpoint, a folder of this run has nothing worth keeping.
    replaces = "--overwrite" in arguments or journal.has_opened
    return (*own, "--overwrite") if replaces else own


def _run_worker(arguments: Sequence[str], journal: Journal) -> int:
    """Runs a cluster worker, and restarts it after a crash."""
    quick_crashes = 0
    while True:
        began = time.monotonic()
        ended = _attempt(arguments, journal)
        if ended == RESTART:
            continue
        if isinstance(ended, int):
            return ended
        is_quick = time.monotonic() - began < _QUICK_CRASH_SECONDS
        quick_crashes = quick_crashes + 1 if is_quick else 1
        if quick_crashes == _MAX_QUICK_CRASHES:
            return _give_up(f"{ended}, {quick_crashes} times in a row: {_advice()}")
        _print(f"note: {ended}; restarting")


# ---- how a process ends --------------------------------------------------------------------------


def _attempt(arguments: Sequence[str], journal: Journal, *, own_group: bool = True) -> int | str:
    """Runs a process: its exit code, or how the driver made it fail."""
    code = _run(arguments, journal, own_group=own_group)
    name = signal_name(code)
    if name == "SIGBUS" and (truncated := journal.truncated_files()):
        return _give_up("; ".join(filter(None, (str(truncated[0]), _kept_checkpoint(journal)))))
    if name == "SIGKILL" and arguments[0] == "worker":
        return "the process was killed (SIGKILL)"
    if (failure := _failure(code, journal)) is not None:
        return failure
    if name == "SIGKILL":
        limit = container_limit()
        most = "" if limit is None else f" (its container is limited to {limit / 2**20:,.0f} MiB)"
        return _give_up(
            f"the process was killed (SIGKILL), probably because memory ran out{most}: checkpoints "
            "are kept, and --resume continues a training run"
        )
    return 128 - code if code < 0 else code  # as shells report a signal


def _kept_checkpoint(journal: Journal) -> str:
    saved = journal.checkpoints()
    return f"{saved[-1]} is kept, and --resume continues from it" if saved else ""


def _advice() -> str:
    return _ADVICE if address_space() is None else MORE_MEMORY


def _give_up(text: str) -> int:
    _print(f"error: {text}", "red")
    return ERROR


def _failure(code: int, journal: Journal) -> str | None:
    """How the driver made a process fail, as the start of a sentence; None if it did not."""
    limit = address_space()  # drivers fail under it, and are not to blame
    if code == LOST:
        return "the GPU was lost" + (f", with {limit}" if limit else "")
    if code == HUNG:
        return f"the GPU driver hangs ({journal.panic_message()})"
    crash = crash_name(code, windows=os.name == "nt")
    if code == 0 and not journal.is_done:
        crash = "exit code 0 before the command completed"
    if crash is None:
        return None
    message, doing = journal.panic_message(), journal.under_way()
    crash += f": {message}" if message else ""
    if limit is not None:
        return f"the process crashed ({crash}), with {limit}"
    return f"the GPU driver crashed ({crash}){' while ' if doing else ''}{doing}"


# ---- a process and its signals -------------------------------------------------------------------


def _run(arguments: Sequence[str], journal: Journal, *, own_group: bool) -> int:
    journal.forget_process()
    # In a group of its own it gets Ctrl-C once, from here, but cannot read from the terminal.
    own_group = own_group and os.name == "posix"
    with ExitStack() as until_its_end:
        with block_signals():
            process = subprocess.Popen(
                [*_command(), *arguments],
                env=journal.environment(),
                process_group=0 if own_group else None,
            )
            if not own_group and is_pending(signal.SIGINT):  # came before there was a process
                process.send_signal(signal.SIGINT)
            forwarder = _SignalForwarder(process, journal, is_graceful=own_group)
            until_its_end.enter_context(forwarder)
        code = process.wait()
    return code if forwarder.killed_by is None else 128 + forwarder.killed_by


def _command() -> list[str]:
    # -P unless the working directory is on the path already: it may hold anybody's modules.
    searched = not sys.flags.safe_path and Path(sys.path[0]) == Path.cwd()
    return [sys.executable, *([] if searched else ["-P"]), "-m", "qlora_wgpu"]


class _SignalForwarder:
    """Passes signals on to a process while it is entered; a second one kills a training run.

    The first signal stops a training run gracefully, with a checkpoint, which may take as long as
    a micro-batch. The second kills it: the latest checkpoint is complete, and no call into a driver
    delays that. Signals in quick succession count once, since `timeout` and service managers send
    theirs to a process and to its whole group.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], journal: Journal, *, is_graceful: bool
    ) -> None:
        self._process, self._journal = process, journal
        self._is_graceful = is_graceful  # whether the first signal stops the process gracefully
        self._first_at: float | None = None  # when that was
        self.killed_by: int | None = None  # the second signal

    def __enter__(self) -> _SignalForwarder:
        graceful = self._is_graceful  # otherwise Ctrl-C reaches the process by itself
        handlers: dict[int, Any] = {
            signal.SIGTERM: self.forward,
            signal.SIGINT: self.forward if graceful else signal.SIG_IGN,
        }
        if os.name == "posix":
            handlers[signal.SIGHUP] = self.forward
            if graceful:
                handlers[signal.SIGTSTP] = self._pause
        self._before = {number: signal.getsignal(number) for number in handlers}
        for number, handler in handlers.items():
            if self._before[number] is not signal.SIG_IGN:  # nohup keeps its meaning
                signal.signal(number, handler)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def forward(self, number: int, frame: FrameType | None = None) -> None:
        """Passes a signal on; the second kills a process that stops gracefully."""
        now = time.monotonic()
        if not self._is_graceful or self._first_at is None:
            self._first_at = now
            self._process.send_signal(number)
            if self._is_graceful and self._journal.has_opened:
                after_bar = "\n" if sys.stderr.isatty() else ""
                _print(f"{after_bar}note: stopping and saving; press Ctrl-C again to exit at once")
        elif now - self._first_at > DEBOUNCE_SECONDS and self._process.poll() is None:
            self.killed_by = number
            self._process.kill()
            if sys.stdout.isatty():  # shows the cursor that a progress bar had hidden
                sys.stdout.write("\x1b[?25h\n")
                sys.stdout.flush()

    def _pause(self, number: int, frame: FrameType | None) -> None:
        self._process.send_signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._process.send_signal(signal.SIGCONT)


def _print(text: str, color: str = "yellow") -> None:
    click.secho(text, file=best_effort(sys.stderr), fg=color)
