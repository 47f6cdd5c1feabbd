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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import click

from qlora_wgpu.errors import ERROR, LOST
from qlora_wgpu.supervision.control_groups import container_limit
from qlora_wgpu.supervision.journal import CutFile, Journal
from qlora_wgpu.supervision.processes import (
    AGAIN,
    HUNG,
    MORE_MEMORY,
    SAME_WISH,
    address_space,
    crash_name,
    held_back,
    is_waiting,
    signal_name,
)
from qlora_wgpu.supervision.streams import all_passed_over

# Milliseconds of a submit in the attempts after a crash: drivers end work that takes them too long.
_SMALLER_SUBMITS = (25, 5, 1)
_SHORT_LIFE, _SHORT_LIVES = 60.0, 5  # seconds of a worker's life; how many of them are too many
_ADVICE = (
    "update its driver, choose another with device.gpu or device.backend, or see what "
    "`qlora-wgpu doctor --check` says"
)


def supervise(arguments: Sequence[str]) -> int:
    """Runs a command of ``qlora-wgpu`` in a process of its own."""
    if (lack := _missing_folder()) is not None:
        _tell_error(lack)
        return ERROR
    with tempfile.TemporaryDirectory(prefix="qlora-wgpu-", ignore_cleanup_errors=True) as folder:
        journal = Journal(os.getpid(), Path(folder))
        if arguments and arguments[0] == "train":
            return _Training(tuple(arguments), journal).run()
        if arguments and arguments[0] == "worker":
            return _working(arguments, journal)
        code = _run(arguments, journal, own_group=False)
        if (cut := _cut_file(code, journal)) is not None:
            _tell_error(str(cut))
            return ERROR
        failure = _failure(code, journal)
        if failure is None:
            return _exit_code(code)
        _tell_error(f"{failure}: {_advice()}")
        return ERROR


def _advice() -> str:
    return _ADVICE if address_space() is None else MORE_MEMORY


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


@dataclass
class _Training:
    """The attempts of a training run."""

    arguments: tuple[str, ...]
    journal: Journal

    def run(self) -> int:
        """Runs until the run ends, or gets nowhere."""
        checkpoints, attempt = 0, 0
        arguments = self.arguments
        while True:
            code = _run(arguments, self.journal, own_group=True)
            failure = _failure(code, self.journal)
            if failure is None:
                return _exit_code(code)
            saved = self.journal.checkpoints()
            if (cut := _cut_file(code, self.journal)) is not None:
                _tell_error(f"{cut}; {self._kept(saved)}".removesuffix("; "))
                return ERROR
            if len(set(saved)) > checkpoints:  # it got further than before
                checkpoints, attempt = len(set(saved)), 0
            if attempt == len(_SMALLER_SUBMITS):
                _tell_error(f"{failure}, as before: {self._kept(saved)}{_advice()}")
                return ERROR
            milliseconds = _SMALLER_SUBMITS[attempt]
            attempt += 1
            arguments = self._again(milliseconds)
            _tell(
                f"note: {failure}; going on from {saved[-1] if saved else 'the beginning'} with "
                f"device.submit_milliseconds={milliseconds}"
            )

    def _again(self, milliseconds: int) -> tuple[str, ...]:
        """The arguments of an attempt that goes on where the one before ended."""
        own = tuple(a for a in self.arguments if a not in ("--overwrite", "--resume"))
        again = (*own, f"device.submit_milliseconds={milliseconds}")
        if self.journal.checkpoints() or "--resume" in self.arguments:
            return (*again, "--resume")
        # Without a checkpoint the folder, once it is ours, holds nothing worth keeping.
        replaces = "--overwrite" in self.arguments or self.journal.has_opened
        return (*again, "--overwrite") if replaces else again

    @staticmethod
    def _kept(saved: Sequence[str]) -> str:
        return f"{saved[-1]} is kept, and --resume goes on from it; " if saved else ""


def _working(arguments: Sequence[str], journal: Journal) -> int:
    """Runs a worker of a cluster, and another after each that crashed, unless they all do."""
    at_once = 0
    while True:
        began = time.monotonic()
        code = _run(arguments, journal, own_group=True)
        if code == AGAIN:
            continue
        if (cut := _cut_file(code, journal)) is not None:
            _tell_error(str(cut))
            return ERROR
        killed = signal_name(code) == "SIGKILL"
        failure = "the process was killed from outside" if killed else _failure(code, journal)
        if failure is None:
            return _exit_code(code)
        at_once = at_once + 1 if time.monotonic() - began < _SHORT_LIFE else 1
        if at_once == _SHORT_LIVES:
            _tell_error(f"{failure}, {at_once} times one after another: {_advice()}")
            return ERROR
        _tell(f"note: {failure}; beginning anew")


def _cut_file(code: int, journal: Journal) -> CutFile | None:
    """The file that ended a process, which had mapped it, by becoming shorter."""
    if signal_name(code) != "SIGBUS":
        return None
    return next(iter(journal.cut_files()), None)


def _failure(code: int, journal: Journal) -> str | None:
    """What the driver did to a process, as the beginning of a sentence; None if nothing."""
    limit = address_space()  # which drivers fail at, and are not to blame for
    if code == LOST:
        return "the GPU was lost" + (f", and the process may have {limit}" if limit else "")
    if code == HUNG:
        return f"the GPU's driver hangs ({journal.last_words()})"
    crash = crash_name(code, windows=os.name == "nt")
    if code == 0 and not journal.take_done():
        crash = "exit code 0, before anything was done"
    if crash is None:
        return None
    words, doing = journal.last_words(), journal.take_under_way()
    if limit is not None:
        return f"the process ended ({crash}{': ' if words else ''}{words}), and it may have {limit}"
    return (
        f"the GPU's driver ended the process ({crash}{': ' if words else ''}{words})"
        f"{' while ' if doing else ''}{doing}"
    )


def _exit_code(code: int) -> int:
    if signal_name(code) == "SIGKILL":
        limit = container_limit()
        most = "" if limit is None else f" (its container may have {limit / 2**20:,.0f} MiB)"
        _tell_error(
            f"the process was killed from outside, as systems do that run out of memory{most}: "
            "what it had saved is kept, and --resume goes on with a training run"
        )
        return ERROR
    return 128 - code if code < 0 else code  # as shells tell a signal


def _run(arguments: Sequence[str], journal: Journal, *, own_group: bool) -> int:
    journal.take_under_way()  # an earlier process's
    journal.take_done()
    # A group of its own, so that Ctrl-C comes once: from here. It cannot read from the terminal.
    own_group = own_group and os.name == "posix"
    with ExitStack() as until_its_end:
        with held_back():
            process = subprocess.Popen(
                [*_command(), *arguments],
                env=journal.environment(),
                process_group=0 if own_group else None,
            )
            if not own_group and is_waiting(signal.SIGINT):  # came before there was a process
                process.send_signal(signal.SIGINT)
            asked = until_its_end.enter_context(
                _passing_on_signals(process, journal, interrupts=own_group)
            )
        code = process.wait()
    return code if asked.killed_by is None else 128 + asked.killed_by


def _command() -> list[str]:
    # -P unless the working directory is searched already: modules of a stranger may lie there.
    searched = not sys.flags.safe_path and Path(sys.path[0]) == Path.cwd()
    return [sys.executable, *([] if searched else ["-P"]), "-m", "qlora_wgpu"]


@dataclass
class _Asked:
    """How often a process was asked to end.

    A training run takes the first time as a wish to stop with its state saved, which may take as
    long as a micro-batch and a checkpoint. The second time it is ended at once: what it had saved
    before is whole, and no call into a driver can hold that up. Signals that come together are one
    wish: `timeout` and service managers send theirs to a process and to all of its group.
    """

    process: subprocess.Popen[bytes]  # the process
    journal: Journal  # the process's
    is_patient: bool  # whether the first time is such a wish
    since: float | None = None  # when that was
    killed_by: int | None = None  # the signal that came a second time

    def again(self, number: int) -> None:
        """Passes a signal on; the second time ends the process."""
        now = time.monotonic()
        if not self.is_patient or self.since is None:
            self.since = now
            self.process.send_signal(number)
            if self.is_patient and self.journal.has_opened:
                beside_a_bar = "\n" if sys.stderr.isatty() else ""
                _tell(f"{beside_a_bar}note: stopping, and saving; once more ends it at once")
        elif now - self.since > SAME_WISH and self.process.poll() is None:
            self.killed_by = number
            self.process.kill()
            _show_cursor()


def _show_cursor() -> None:
    """Brings back what a bar had hidden, after its process could not."""
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h\n")
        sys.stdout.flush()


@contextmanager
def _passing_on_signals(
    process: subprocess.Popen[bytes], journal: Journal, *, interrupts: bool
) -> Iterator[_Asked]:
    """Passes on what asks a process to end; what stops it for a while stops both."""
    asked = _Asked(process, journal, is_patient=interrupts)

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.again(number)

    def pause(number: int, frame: FrameType | None) -> None:
        process.send_signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        process.send_signal(signal.SIGCONT)

    handlers = {signal.SIGTERM: pass_on, signal.SIGINT: pass_on if interrupts else signal.SIG_IGN}
    if os.name == "posix":
        handlers[signal.SIGHUP] = pass_on
        if interrupts:
            handlers[signal.SIGTSTP] = pause
    before = {number: signal.getsignal(number) for number in handlers}
    for number, handler in handlers.items():
        if before[number] is not signal.SIG_IGN:  # nohup keeps its meaning
            signal.signal(number, handler)
    try:
        yield asked
    finally:
        for number, own in before.items():
            signal.signal(number, own)


def _tell(text: str, color: str = "yellow") -> None:
    click.secho(text, file=all_passed_over(sys.stderr), fg=color)


def _tell_error(text: str) -> None:
    _tell(f"error: {text}", "red")
