"""The supervising side: it starts a command, passes signals on, and explains a crash.

A training run goes on from its newest checkpoint; each time it asks the driver for less at once.
A worker of a cluster begins anew.
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
from qlora_wgpu.supervision.journal import Journal
from qlora_wgpu.supervision.processes import (
    AGAIN,
    HUNG,
    MORE_MEMORY,
    SAME_WISH,
    address_space,
    block_signals,
    container_limit,
    crash_name,
    is_waiting,
    signal_name,
)
from qlora_wgpu.supervision.streams import all_passed_over

# Milliseconds of a submit in the attempts after a crash: drivers end work that takes them too long.
_SMALLER_SUBMITS = (25, 5, 1)
# Verbs that open a GPU, list GPUs, or map weights, which others may cut meanwhile.
_SUPERVISED = frozenset(
    ("bench", "chat", "data", "doctor", "estimate", "eval", "export", "generate", "merge",
     "quantize", "serve", "train", "web", "worker")
)  # fmt: skip
_HELP = (["--help"], ["-h"])
_SHORT_LIFE, _SHORT_LIVES = 60.0, 5  # seconds of a worker's life; how many of them are too many
_ADVICE = (
    "update its driver, choose another with device.gpu or device.backend, or see what "
    "`qlora-wgpu doctor --check` says"
)


def supervise(arguments: Sequence[str]) -> int | None:
    """Runs a command in a process of its own; its exit code, or None where it needs none."""
    if (lack := _missing_folder()) is not None:
        return _give_up(lack)
    if not arguments or arguments[0] not in _SUPERVISED or [*arguments[1:]] in _HELP:
        return None
    with tempfile.TemporaryDirectory(prefix="qlora-wgpu-", ignore_cleanup_errors=True) as folder:
        journal = Journal(os.getpid(), Path(folder))
        if arguments[0] == "train":
            return _train(tuple(arguments), journal)
        if arguments[0] == "worker":
            return _work(arguments, journal)
        ended = _ended(arguments, journal, own_group=False)
        return ended if isinstance(ended, int) else _give_up(f"{ended}: {_advice()}")


def _missing_folder() -> str | None:
    """What is wrong where a folder is missing that every command needs; None if they are there."""
    try:
        Path.cwd()
    except OSError as err:
        return f"the working directory cannot be used ({err.strerror}): change to one that is there"
    try:
        tempfile.gettempdir()
    except OSError:
        return "no folder for temporary files can be written: name one in TMPDIR"
    return None


# ---- attempts ------------------------------------------------------------------------------------


def _train(arguments: tuple[str, ...], journal: Journal) -> int:
    """Runs a training run until it ends, or gets nowhere."""
    checkpoints, attempt, now = 0, 0, arguments
    while isinstance(ended := _ended(now, journal), str):
        saved = journal.checkpoints()
        if len(set(saved)) > checkpoints:  # it got further than before
            checkpoints, attempt = len(set(saved)), 0
        if attempt == len(_SMALLER_SUBMITS):
            kept = f"{kept}; " if (kept := _kept(journal)) else ""
            return _give_up(f"{ended}, as before: {kept}{_advice()}")
        smaller = f"device.submit_milliseconds={_SMALLER_SUBMITS[attempt]}"
        attempt += 1
        now = _again(arguments, journal, smaller)
        begin = saved[-1] if saved else "the beginning"
        _tell(f"note: {ended}; going on from {begin} with {smaller}")
    return ended


def _again(arguments: tuple[str, ...], journal: Journal, smaller: str) -> tuple[str, ...]:
    """The arguments of an attempt that goes on where the one before ended."""
    own = (*(a for a in arguments if a not in ("--overwrite", "--resume")), smaller)
    if journal.checkpoints() or "--resume" in arguments:
        return (*own, "--resume")
    # Without a checkpoint the folder, once it is ours, holds nothing worth keeping.
    replaces = "--overwrite" in arguments or journal.has_opened
    return (*own, "--overwrite") if replaces else own


def _work(arguments: Sequence[str], journal: Journal) -> int:
    """Runs a worker of a cluster, and another after each that crashed, unless they all do."""
    at_once = 0
    while True:
        began = time.monotonic()
        ended = _ended(arguments, journal)
        if ended == AGAIN:
            continue
        if isinstance(ended, int):
            return ended
        at_once = at_once + 1 if time.monotonic() - began < _SHORT_LIFE else 1
        if at_once == _SHORT_LIVES:
            return _give_up(f"{ended}, {at_once} times one after another: {_advice()}")
        _tell(f"note: {ended}; beginning anew")


# ---- how a process ends --------------------------------------------------------------------------


def _ended(arguments: Sequence[str], journal: Journal, *, own_group: bool = True) -> int | str:
    """Runs a process: its exit code, or what the driver did to it."""
    code = _run(arguments, journal, own_group=own_group)
    name = signal_name(code)
    if name == "SIGBUS" and (cut := journal.cut_files()):  # which it had mapped
        return _give_up("; ".join(filter(None, (str(cut[0]), _kept(journal)))))
    if name == "SIGKILL" and arguments[0] == "worker":
        return "the process was killed from outside"
    if (failure := _failure(code, journal)) is not None:
        return failure
    if name == "SIGKILL":
        limit = container_limit()
        most = "" if limit is None else f" (its container may have {limit / 2**20:,.0f} MiB)"
        return _give_up(
            f"the process was killed from outside, as systems do that run out of memory{most}: "
            "what it had saved is kept, and --resume goes on with a training run"
        )
    return 128 - code if code < 0 else code  # as shells tell a signal


def _kept(journal: Journal) -> str:
    saved = journal.checkpoints()
    return f"{saved[-1]} is kept, and --resume goes on from it" if saved else ""


def _advice() -> str:
    return _ADVICE if address_space() is None else MORE_MEMORY


def _give_up(text: str) -> int:
    _tell(f"error: {text}", "red")
    return ERROR


def _failure(code: int, journal: Journal) -> str | None:
    """What the driver did to a process, as the beginning of a sentence; None if nothing."""
    limit = address_space()  # which drivers fail at, and are not to blame for
    if code == LOST:
        return "the GPU was lost" + (f", and the process may have {limit}" if limit else "")
    if code == HUNG:
        return f"the GPU's driver hangs ({journal.last_words()})"
    crash = crash_name(code, windows=os.name == "nt")
    if code == 0 and not journal.is_done:
        crash = "exit code 0, before anything was done"
    if crash is None:
        return None
    words, doing = journal.last_words(), journal.under_way()
    if limit is not None:
        return f"the process ended ({crash}{': ' if words else ''}{words}), and it may have {limit}"
    return (
        f"the GPU's driver ended the process ({crash}{': ' if words else ''}{words})"
        f"{' while ' if doing else ''}{doing}"
    )


# ---- a process and its signals -------------------------------------------------------------------


def _run(arguments: Sequence[str], journal: Journal, *, own_group: bool) -> int:
    journal.forget_process()
    # A group of its own, so that Ctrl-C comes once: from here. It cannot read from the terminal.
    own_group = own_group and os.name == "posix"
    with ExitStack() as until_its_end:
        with block_signals():
            process = subprocess.Popen(
                [*_command(), *arguments],
                env=journal.environment(),
                process_group=0 if own_group else None,
            )
            if not own_group and is_waiting(signal.SIGINT):  # came before there was a process
                process.send_signal(signal.SIGINT)
            asked = until_its_end.enter_context(_Asked(process, journal, is_patient=own_group))
        code = process.wait()
    return code if asked.killed_by is None else 128 + asked.killed_by


def _command() -> list[str]:
    # -P unless the working directory is searched already: modules of a stranger may lie there.
    searched = not sys.flags.safe_path and Path(sys.path[0]) == Path.cwd()
    return [sys.executable, *([] if searched else ["-P"]), "-m", "qlora_wgpu"]


class _Asked:
    """How often a process was asked to end, while this is entered: signals are passed on to it.

    A training run takes the first time as a wish to stop with its state saved, which may take as
    long as a micro-batch and a checkpoint. The second time it is ended at once: what it had saved
    before is whole, and no call into a driver can hold that up. Signals that come together are one
    wish: `timeout` and service managers send theirs to a process and to all of its group.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], journal: Journal, *, is_patient: bool
    ) -> None:
        self._process, self._journal = process, journal
        self._is_patient = is_patient  # whether the first time is such a wish
        self._since: float | None = None  # when that was
        self.killed_by: int | None = None  # the signal that came a second time

    def __enter__(self) -> _Asked:
        ends = self._is_patient  # elsewhere Ctrl-C reaches the process by itself
        handlers: dict[int, Any] = {
            signal.SIGTERM: self.again,
            signal.SIGINT: self.again if ends else signal.SIG_IGN,
        }
        if os.name == "posix":
            handlers[signal.SIGHUP] = self.again
            if ends:
                handlers[signal.SIGTSTP] = self._pause
        self._before = {number: signal.getsignal(number) for number in handlers}
        for number, handler in handlers.items():
            if self._before[number] is not signal.SIG_IGN:  # nohup keeps its meaning
                signal.signal(number, handler)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def again(self, number: int, frame: FrameType | None = None) -> None:
        """Passes a signal on; the second time ends the process."""
        now = time.monotonic()
        if not self._is_patient or self._since is None:
            self._since = now
            self._process.send_signal(number)
            if self._is_patient and self._journal.has_opened:
                beside_a_bar = "\n" if sys.stderr.isatty() else ""
                _tell(f"{beside_a_bar}note: stopping, and saving; once more ends it at once")
        elif now - self._since > SAME_WISH and self._process.poll() is None:
            self.killed_by = number
            self._process.kill()
            if sys.stdout.isatty():  # brings back what a bar had hidden
                sys.stdout.write("\x1b[?25h\n")
                sys.stdout.flush()

    def _pause(self, number: int, frame: FrameType | None) -> None:
        """What stops the process for a while stops both."""
        self._process.send_signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._process.send_signal(signal.SIGCONT)


def _tell(text: str, color: str = "yellow") -> None:
    """Writes a line to stderr, if anybody reads it."""
    click.secho(text, file=all_passed_over(sys.stderr), fg=color)
