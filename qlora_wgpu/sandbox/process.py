"""Functions called in a child process that may neither compute nor grow without bound.

The child ends itself when a call takes too long, even where this process has been killed
meanwhile, and ends when its pipe does. What it answers is JSON, so that nothing it may have been
made to say can run here.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from qlora_wgpu import errors
from qlora_wgpu.limits import (
    ANSWER_BYTES,
    CHILD_BYTES,
    CHILD_SECONDS,
    CHILD_SECONDS_PER_BYTE,
    CHILD_SECONDS_REGAINED,
    CHILD_WAIT,
)

QUESTION = struct.Struct("<Qdd")  # bytes that follow; seconds of computing, and by the clock
ANSWER = struct.Struct("<Qd")  # bytes that follow, and seconds that it took
_TIMER = -signal.SIGPROF if hasattr(signal, "SIGPROF") else 1  # status of what took too long

# The packages' own __init__ would import all of them, which takes most of a second.
_START = """\
import sys, types
sys.path[:] = {path!r}
for name, folder in {packages!r}.items():
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
from qlora_wgpu.sandbox.child import main
main({module!r})
"""
_ENVIRONMENT = (
    "SYSTEMROOT",
    "PATH",
    "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH",
    "TZ",
    "LANG",
    "LC_ALL",
)


class SandboxError(Exception):
    """A call was not answered; the message says what it does, as in "takes too long"."""


class SandboxProcess:
    """A child process that answers calls, one at a time, and is started when it is needed.

    After a call that went wrong it is ended, and the next call starts another one.
    """

    def __init__(self, module: str, setup: tuple[Any, ...] = ()) -> None:
        """Says what the process will need; nothing is started yet.

        Args:
            module: The module of ``qlora_wgpu``, such as ``sandbox.templates``, whose functions
                will be called: it imports all that they need, for the child can open no file once
                it has begun.
            setup: A function and its arguments, called first in each process that is started.
        """
        self._module = module
        self._setup = setup
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._spare = CHILD_SECONDS
        self._spent = 0.0
        self._answers = 0

    def call(self, function: Callable[..., Any], *args: Any, answers: int = 1) -> Any:
        """What a function gives for some arguments, as JSON keeps it.

        What answers several questions at once may take as long as they would one by one.
        """
        question = pickle.dumps((function, args), pickle.HIGHEST_PROTOCOL)
        with self._lock:
            if not self._is_running():
                self._start()
            answer = self._ask(question, answers)
        return _value(answer)

    def close(self) -> None:
        """Ends the process, if there is one."""
        if self._process is not None:
            self._finalizer()
        self._process = None

    def _is_running(self) -> bool:
        """Whether there is a process, and this one did not inherit it from the one that forked."""
        if self._process is None or self._owner != os.getpid():
            return False
        return self._process.poll() is None

    def _start(self) -> None:
        start = _START.format(path=_paths(), packages=_packages(), module=self._module)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", start],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
            start_new_session=True,  # an interrupt at the keyboard is not for it
        )
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, _end, self._process, self._owner)
        self._spare = CHILD_SECONDS
        self._spent = 0.0
        self._answers = 0
        if self._setup:
            answer = self._ask(pickle.dumps((self._setup[0], self._setup[1:])))
            if "error" in answer:  # it is not ready for any call
                self.close()
            _value(answer)

    def _ask(self, question: bytes, answers: int = 1) -> Mapping[str, Any]:
        """Sends a call and waits for what comes back; ends the process where that goes wrong."""
        assert self._process is not None and self._process.stdin and self._process.stdout
        more = len(question) * CHILD_SECONDS_PER_BYTE + (answers - 1) * CHILD_SECONDS_REGAINED
        seconds, wait = self._spare + more, CHILD_WAIT + 10 * more
        try:
            self._process.stdin.write(QUESTION.pack(len(question), seconds, wait))
            self._process.stdin.write(question)
            self._process.stdin.flush()
            with _watched(self._process):
                answer, spent = _read(self._process)
        except (OSError, EOFError):
            status = self._status()
            if status == _TIMER:
                raise SandboxError(self._too_long(seconds)) from None
            raise SandboxError(_reason(status, wait)) from None
        except BaseException:  # an interrupt would leave half an answer in the pipe
            self.close()
            raise
        if "stopped" in answer:
            self.close()
            raise SandboxError(answer["stopped"])
        if spent >= seconds:  # the timer, which counts in ticks of the system, came too late
            self.close()
            raise SandboxError(self._too_long(seconds))
        self._spare = min(seconds - spent + CHILD_SECONDS_REGAINED, CHILD_SECONDS)
        self._spent += spent
        self._answers += answers
        return answer

    def _status(self) -> int:
        """What the process has ended with; it is ended if it has not."""
        process, self._process = self._process, None
        assert process is not None
        _close_pipes(process)
        try:
            return process.wait(1)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def _too_long(self, seconds: float) -> str:
        if self._spare > CHILD_SECONDS / 2:
            return f"takes more than {seconds:.1f} seconds of computing"
        most, answers = self._spent + seconds, self._answers + 1
        return f"takes more than {most:.1f} seconds of computing for {answers} answers"


def _paths() -> list[str]:
    return [str(Path(entry).resolve()) for entry in sys.path if isinstance(entry, str)]


def _packages() -> dict[str, str]:
    """The folders of this package and of the rooms that child processes import of."""
    root = Path(__file__).resolve().parents[1]
    rooms = {f"qlora_wgpu.{room}": str(root / room) for room in ("data", "sandbox")}
    return {"qlora_wgpu": str(root), **rooms}


def _environment() -> dict[str, str]:
    """Nothing that is secret, and nothing that makes a library start threads."""
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    return {**kept, "TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "1"}


_LIMITED = sys.platform not in ("darwin", "win32")  # memory, by the operating system
_LOOKS = 0.02  # seconds from one look at a process's memory to the next


@contextmanager
def _watched(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kills a process that takes too much memory, where the operating system does not limit it."""
    if _LIMITED:
        yield
        return
    answered, killed = threading.Event(), threading.Event()
    watcher = threading.Thread(target=_watch, args=(process, answered, killed), daemon=True)
    watcher.start()
    try:
        yield
    except (OSError, EOFError):
        if killed.is_set():
            raise SandboxError(f"needs more than {CHILD_BYTES // 2**20} MB of memory") from None
        raise
    finally:
        answered.set()
        watcher.join()


def _watch(
    process: subprocess.Popen[bytes], answered: threading.Event, killed: threading.Event
) -> None:
    import psutil  # here, since the child imports this module

    with suppress(psutil.Error):
        seen = psutil.Process(process.pid)
        while not answered.wait(_LOOKS):
            if seen.memory_info().rss > CHILD_BYTES:
                killed.set()
                process.kill()
                return


def _read(process: subprocess.Popen[bytes]) -> tuple[Mapping[str, Any], float]:
    """An answer, and the seconds of computing that it took."""
    size, spent = ANSWER.unpack(_exactly(process, ANSWER.size))
    if size > ANSWER_BYTES:
        raise OSError("too large an answer")
    answer = json.loads(_exactly(process, size).decode("utf-8", "surrogatepass"))
    assert isinstance(answer, dict)
    return answer, spent


def _exactly(process: subprocess.Popen[bytes], size: int) -> bytes:
    assert process.stdout is not None
    part = process.stdout.read(size)
    if len(part) < size:
        raise EOFError("the process has ended")
    return part


def _value(answer: Mapping[str, Any]) -> Any:
    if "error" in answer:
        raise error_of(*answer["error"])
    return answer["value"]


def error_of(name: str, message: str) -> errors.QLoRAError:
    """An error of this package by its class's name, as a child process tells of it."""
    kind = getattr(errors, name, None)
    is_ours = isinstance(kind, type) and issubclass(kind, errors.QLoRAError)
    return (kind if is_ours and kind else errors.QLoRAError)(message)


def _reason(status: int, wait: float) -> str:
    if hasattr(signal, "SIGALRM") and status == -signal.SIGALRM:
        return f"gives no answer within {wait:.0f} seconds"
    how = signal.Signals(-status).name if status < 0 else f"status {status}"
    return f"ends its process ({how}), which may have {CHILD_BYTES // 2**20} MB of memory"


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        try:
            if pipe is not None:
                pipe.close()
        except OSError:  # what is still to be written has no reader
            pass


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """Ends a process that this one started, not one that it inherited."""
    if owner != os.getpid():
        return
    process.kill()  # it has nothing to save
    _close_pipes(process)
    process.wait()
