"""Functions called in a child process that may neither compute nor grow without bound.

The child ends itself when a call takes too long, even where this process has been killed
meanwhile, and ends when its pipe does. What it answers is JSON, so that nothing it may have been
made to say can run here.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from qlora_wgpu import errors
from qlora_wgpu.errors import QLoRAError
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
from qlora_wgpu.sandbox.process import main
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


_MESSAGE = 1000  # characters of an error


def main(module: str) -> None:
    """Answers calls of a module's functions until the pipe ends."""
    questions, answers = _pipes()
    refusal = _import(module)
    _limit()
    begin = time.process_time()
    while len(head := questions.read(QUESTION.size)) == QUESTION.size:
        size, seconds, wait = QUESTION.unpack(head)
        question = questions.read(size)
        with _timer(seconds, wait):
            answer = refusal or _answer(question)
        # From answer to answer: Linux moves this clock in ticks while a timer runs, so that what a
        # short one took may show in the next one's time alone.
        end = time.process_time()
        answers.write(ANSWER.pack(len(answer), end - begin) + answer)
        answers.flush()
        begin = end


def _pipes() -> tuple[BinaryIO, BinaryIO]:
    """Standard input and output, which libraries that print can no longer reach."""
    questions, answers = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nowhere, descriptor)
    return os.fdopen(questions, "rb"), os.fdopen(answers, "wb")


def _import(module: str) -> bytes:
    """Imports a module; gives what to answer where that fails, which nobody would see else."""
    try:
        importlib.import_module(f"qlora_wgpu.{module}")
    except Exception as err:
        name = module.rpartition(".")[2]
        told = f"the process for {name} cannot start: {type(err).__name__}: {err}"
        return json.dumps({"error": ["QLoRAError", told[:_MESSAGE]]}).encode()
    return b""


def _limit() -> None:
    """Holds this process to its memory, and keeps it from opening or starting anything.

    Windows has no such limits, and macOS does not enforce the one on memory: there, the process
    that has started this one watches it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        import resource
    except ImportError:
        return
    most = {"DATA": CHILD_BYTES, "AS": 2 * CHILD_BYTES, "NOFILE": 0, "NPROC": 0, "FSIZE": 0}
    for name, value in {**most, "CORE": 0}.items():
        kind = getattr(resource, f"RLIMIT_{name}", None)
        if kind is None:
            continue
        try:
            resource.setrlimit(kind, (value, value))
        except (OSError, ValueError):  # macOS, where the process already maps more
            continue


@contextmanager
def _timer(seconds: float, wait: float) -> Iterator[None]:
    """Ends this process if what is within takes longer; no code of Python's is needed for it."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, wait)  # should it wait without computing
        yield
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    else:
        import faulthandler

        faulthandler.dump_traceback_later(seconds, exit=True)
        yield
        faulthandler.cancel_dump_traceback_later()


def _answer(question: bytes) -> bytes:
    try:
        function, args = pickle.loads(question)
        answer: dict[str, Any] = {"value": function(*args)}
    except QLoRAError as err:
        answer = {"error": [type(err).__name__, str(err)[:_MESSAGE]]}
    except MemoryError:
        answer = {"stopped": f"needs more than {CHILD_BYTES // 2**20} MB of memory"}
    except Exception as err:
        answer = {"error": ["QLoRAError", f"{type(err).__name__}: {err}"[:_MESSAGE]]}
    try:
        encoded = json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except MemoryError:
        encoded = b'{"stopped": "needs too much memory for its answer"}'
    if len(encoded) > ANSWER_BYTES:
        return json.dumps({"stopped": f"gives more than {ANSWER_BYTES // 2**20} MB"}).encode()
    return encoded
