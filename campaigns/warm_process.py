"""Commands of the project in processes that start within milliseconds.

This process imports all that a command needs and forks another for each, which opens the GPU. A
``Worker`` does many commands one after the other on one device, which saves most of the rest.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import mmap
import os
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO

from campaigns.file_faults import Fault, Injector, install

PATIENCE = 300.0  # seconds of the clock; what counts is the processor's time, below
MOST_SECONDS = 10.0
MOST_MIB = 1024
_REMEMBER = "CAMPAIGN_REMEMBER"


@dataclass(frozen=True)
class Command:
    """``qlora-wgpu ARGUMENTS``, without the process that supervises it.

    Attributes:
        arguments: Of the command line.
        environ: Set in its environment.
        fault: What happens to its files.
        plots: Whether matplotlib may be imported, which takes a third of a small run.
    """

    arguments: tuple[str, ...]
    environ: dict[str, str]
    fault: Fault
    plots: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a command ended.

    Attributes:
        code: The exit code, or a signal's number below zero.
        text: What it printed.
        cpu: Seconds of the processor.
        mib: The most memory that its process had.
        operations: File operations that were counted.
        hung: Whether it had to be ended.
    """

    code: int
    text: str
    cpu: float
    mib: int
    operations: int
    hung: bool = False

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL and not self.hung

    @property
    def sentence(self) -> str:
        """The error that it ended with; empty unless it is one line."""
        lines = [line for line in self.text.splitlines() if line.startswith("error: ")]
        return lines[0] if len(lines) == 1 else ""

    @property
    def gist(self) -> str:
        """What says how it went: warnings, errors, where it went on from, a traceback's end."""
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        words = ("warning: ", "error: ", "resumed from")
        told = [line for line in lines if line.startswith(words)]
        frames = [line for line in lines if line.startswith("File ") and "qlora_wgpu/" in line]
        return " | ".join([*told[-4:], *frames[-1:], f"exit code {self.code}", *lines[-1:]])[:900]

    def faults(self) -> list[str]:
        """What no process may do, whatever happens to its files."""
        faults = []
        if "Traceback" in self.text or "Exception ignored" in self.text:
            faults.append("traceback")
        elif self.hung:
            faults.append("hang")
        elif self.code not in (0, 2) and not self.killed:
            faults.append(f"exit code {self.code}")
        elif self.code == 2 and not self.sentence:
            faults.append("no sentence")
        if self.cpu > MOST_SECONDS:
            faults.append(f"over {MOST_SECONDS:.0f} s")
        if self.mib > MOST_MIB:
            faults.append("over 1 GB")
        return faults


def run(command: Command, kill_after: float | None = None) -> Outcome:
    """Runs a command in a process of its own.

    Args:
        command: The command.
        kill_after: Seconds of the processor after which it is killed.
    """
    counts = _shared_count()
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if pid == 0:
            _child(command, counts, output)
        status, cpu, mib, hung = _wait(pid, kill_after)
        text = _text(output)
    return Outcome(os.waitstatus_to_exitcode(status), text, cpu, mib, counts[0], hung)


class Worker:
    """A process that runs commands on one device, and is replaced after many or a hang."""

    MOST = 300  # commands of one process

    def __init__(self) -> None:
        self._counts = _shared_count()
        self._output: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115
        self._process: Any = None
        self._connection: Connection | None = None
        self._done = 0

    def run(self, command: Command) -> Outcome:
        if self._process is None or self._done >= self.MOST:
            self._start()
        assert self._connection is not None
        self._done += 1
        self._output.truncate(0)
        self._connection.send(command)
        try:
            if self._connection.poll(PATIENCE):
                code, cpu, mib = self._connection.recv()
                return Outcome(code, _text(self._output), cpu, mib, self._counts[0])
            hung, code = True, -signal.SIGKILL
        except EOFError:
            self._process.join()
            hung, code = False, self._process.exitcode
        self.end()
        return Outcome(code, _text(self._output), 0.0, 0, self._counts[0], hung)

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None

    def _start(self) -> None:
        self.end()
        context = get_context("fork")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, self._counts, self._output)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self._done = 0


def warm_up(first: Command) -> Outcome:
    """Runs a first command, then imports here what it had imported and parses its C types."""
    with tempfile.NamedTemporaryFile("r+") as file:
        os.environ[_REMEMBER] = file.name
        outcome = run(first)
        del os.environ[_REMEMBER]
        learnt = json.loads(file.read() or '{"modules": [], "types": []}')
    for name in learnt["modules"]:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    ffi: Any = getattr(sys.modules.get("wgpu.backends.wgpu_native"), "ffi", None)
    for name in learnt["types"]:
        with contextlib.suppress(Exception):
            ffi.typeof(name)
    return outcome


def _shared_count() -> memoryview[int]:
    return memoryview(mmap.mmap(-1, 8)).cast("q")


def _text(output: BinaryIO) -> str:
    output.seek(0)
    return output.read().decode("utf-8", errors="replace")


def _wait(pid: int, kill_after: float | None) -> tuple[int, float, int, bool]:
    """Waits for a process, or until it is to be killed; and kills what it has left running."""
    end = time.monotonic() + PATIENCE
    ended = False
    with contextlib.closing(os.fdopen(os.pidfd_open(pid))) as handle:
        while not ended and time.monotonic() < end:
            if kill_after is not None and _cpu_of(pid) >= kill_after:
                break
            ended = bool(select.select([handle], [], [], 0.002 if kill_after else PATIENCE)[0])
    hung = not ended and time.monotonic() >= end
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    return status, usage.ru_utime + usage.ru_stime, usage.ru_maxrss // 1024, hung


def _cpu_of(pid: int) -> float:
    """Seconds of the processor that a process has had."""
    return time.clock_gettime((~pid << 3) | 2)  # Linux's number for that clock


def _child(command: Command, counts: memoryview[int], output: BinaryIO) -> None:
    """The forked process of ``run``; it never returns."""
    code = 70
    try:
        _settle(output)
        injector = Injector(counts)
        install(injector)
        code = _call(command, injector)
        _remember()
    finally:
        os._exit(code)


def _serve(connection: Connection, counts: memoryview[int], output: BinaryIO) -> None:
    """The process of a ``Worker``."""
    _settle(output)
    injector = Injector(counts)
    install(injector)
    _share_device()
    while True:
        command = connection.recv()
        before = time.process_time()
        code = _call(command, injector)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        connection.send((code, time.process_time() - before, usage.ru_maxrss // 1024))


def _settle(output: BinaryIO) -> None:
    """A process group of its own that ends with the campaign, and prints into a file."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False, buffering=1)


def _call(command: Command, injector: Injector) -> int:
    """Runs a command in this process; its exit code."""
    from qlora_wgpu.cli import run_command

    os.lseek(1, 0, os.SEEK_SET)
    os.environ.update(command.environ)
    tempfile.tempdir = None  # asked for again
    sys.argv = ["qlora-wgpu", *command.arguments]
    with _hidden("matplotlib.figure", hide=not command.plots):
        injector.arm(command.fault)
        try:
            run_command()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            code = 1
            traceback.print_exc()
        gc.collect()  # files that nobody closed
        injector.disarm()
    sys.stdout.flush()
    return code


@contextlib.contextmanager
def _hidden(module: str, *, hide: bool) -> Any:
    before = sys.modules.get(module)
    if hide:
        sys.modules[module] = None  # type: ignore[assignment]
    yield
    if hide and before is not None:
        sys.modules[module] = before
    elif hide:
        del sys.modules[module]


def _share_device() -> None:
    """Lets all commands of this process use one device, whose pipelines stay compiled."""
    opening: Any = importlib.import_module("qlora_wgpu.runs.opening")
    original, devices = opening.Device, {}

    def device(*arguments: Any, **options: Any) -> Any:
        key = (arguments, *sorted(options.items()))
        if key not in devices:
            devices[key] = original(*arguments, **options)
        return devices[key]

    opening.Device = device


def _remember() -> None:
    if path := os.environ.get(_REMEMBER):
        ffi = getattr(sys.modules.get("wgpu.backends.wgpu_native"), "ffi", None)
        types = [name for name in getattr(ffi, "_parsed_types", ()) if isinstance(name, str)]
        Path(path).write_text(json.dumps({"modules": list(sys.modules), "types": types}))
