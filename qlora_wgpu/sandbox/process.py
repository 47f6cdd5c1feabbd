"""Calls of functions in a child process with limited time and memory.

The child exits when a call takes too long, even if this process has been killed, and when its pipe
closes. Its responses are JSON, so that nothing in them can run here.
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

# ---- the parent process --------------------------------------------------------------------------

REQUEST = struct.Struct("<Qdd")  # bytes that follow; maximum CPU seconds and wall-clock seconds
RESPONSE = struct.Struct("<Qd")  # bytes that follow; CPU seconds used
_TIMER = -signal.SIGPROF if hasattr(signal, "SIGPROF") else 1  # exit status after a timeout

# The packages' own __init__ would import all of their modules, which takes most of a second.
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
    "SYSTEMROOT", "PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ", "LANG", "LC_ALL",
)  # fmt: skip


class SandboxError(Exception):
    """A call failed; the message is a predicate, such as "takes too long"."""


class SandboxProcess:
    """A child process that runs calls one at a time; it is started on the first call.

    A call that fails ends it, and the next call starts another one.
    """

    def __init__(self, module: str, setup: tuple[Any, ...] = ()) -> None:
        """Takes a module's name, and a function with arguments to call first in each process.

        The module, such as ``sandbox.templates``, must import everything that its functions need,
        because the child cannot open files afterwards.
        """
        self._module = module
        self._setup = setup
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._spare = CHILD_SECONDS
        self._spent = 0.0
        self._items = 0

    def call(self, function: Callable[..., Any], *args: Any, items: int = 1) -> Any:
        """Calls a function and returns its result, converted to JSON and back.

        The time limit grows with ``items``, the number of items that the call processes.
        """
        request = pickle.dumps((function, args), pickle.HIGHEST_PROTOCOL)
        with self._lock:
            child = self._process
            is_own = child is not None and self._owner == os.getpid()  # not inherited by a fork
            if child is None or not is_own or child.poll() is not None:
                self._start()
            response = self._send(request, items)
        return _value(response)

    def close(self) -> None:
        """Ends the process, if there is one."""
        if self._process is not None:
            self._finalizer()
        self._process = None

    def _start(self) -> None:
        start = _START.format(path=_paths(), packages=_packages(), module=self._module)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", start],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
            start_new_session=True,  # Ctrl-C must not reach it
        )
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, _end, self._process, self._owner)
        self._spare = CHILD_SECONDS
        self._spent = 0.0
        self._items = 0
        if self._setup:
            response = self._send(pickle.dumps((self._setup[0], self._setup[1:])))
            if "error" in response:  # it is not ready for any call
                self.close()
            _value(response)

    def _send(self, request: bytes, items: int = 1) -> Mapping[str, Any]:
        """Sends a request and waits for the response; ends the process if that fails."""
        assert self._process is not None and self._process.stdin and self._process.stdout
        more = len(request) * CHILD_SECONDS_PER_BYTE + (items - 1) * CHILD_SECONDS_REGAINED
        seconds, wait = self._spare + more, CHILD_WAIT + 10 * more
        try:
            self._process.stdin.write(REQUEST.pack(len(request), seconds, wait))
            self._process.stdin.write(request)
            self._process.stdin.flush()
            with _watched(self._process):
                response, spent = _read(self._process)
        except (OSError, EOFError):
            status = self._status()
            if status == _TIMER:
                raise SandboxError(self._too_long(seconds)) from None
            raise SandboxError(_reason(status, wait)) from None
        except BaseException:  # an interrupt would leave part of a response in the pipe
            self.close()
            raise
        if "stopped" in response:
            self.close()
            raise SandboxError(response["stopped"])
        if spent >= seconds:  # the timer, which counts the system's ticks, was too late
            self.close()
            raise SandboxError(self._too_long(seconds))
        self._spare = min(seconds - spent + CHILD_SECONDS_REGAINED, CHILD_SECONDS)
        self._spent += spent
        self._items += items
        return response

    def _status(self) -> int:
        """The exit status of the process, which is killed if it has not exited."""
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
            return f"takes more than {seconds:.1f} seconds of CPU time"
        total, items = self._spent + seconds, self._items + 1
        return f"takes more than {total:.1f} seconds of CPU time for {items} items"


def _paths() -> list[str]:
    return [str(Path(entry).resolve()) for entry in sys.path if isinstance(entry, str)]


def _packages() -> dict[str, str]:
    """The folders of the packages that child processes import from."""
    root = Path(__file__).resolve().parents[1]
    inner = {f"qlora_wgpu.{name}": str(root / name) for name in ("data", "sandbox")}
    return {"qlora_wgpu": str(root), **inner}


def _environment() -> dict[str, str]:
    """Environment variables without secrets, and with one thread per library."""
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    return {**kept, "TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "1"}


_LIMITED = sys.platform not in ("darwin", "win32")  # the operating system limits memory
_PERIOD = 0.02  # seconds between two checks of a process's memory


@contextmanager
def _watched(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kills a process that takes too much memory if the operating system does not limit it."""
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
    import psutil  # not in the child, which imports this module

    with suppress(psutil.Error):
        seen = psutil.Process(process.pid)
        while not answered.wait(_PERIOD):
            if seen.memory_info().rss > CHILD_BYTES:
                killed.set()
                process.kill()
                return


def _read(process: subprocess.Popen[bytes]) -> tuple[Mapping[str, Any], float]:
    """A response, and the CPU seconds that it took."""
    size, spent = RESPONSE.unpack(_exactly(process, RESPONSE.size))
    if size > ANSWER_BYTES:
        raise OSError("the response is too large")
    response = json.loads(_exactly(process, size).decode("utf-8", "surrogatepass"))
    assert isinstance(response, dict)
    return response, spent


def _exactly(process: subprocess.Popen[bytes], size: int) -> bytes:
    assert process.stdout is not None
    part = process.stdout.read(size)
    if len(part) < size:
        raise EOFError("the process has ended")
    return part


def _value(response: Mapping[str, Any]) -> Any:
    if "error" in response:
        raise error_of(*response["error"])
    return response["value"]


def error_of(name: str, message: str) -> errors.QLoRAError:
    """An error of this package by its class's name, as child processes report it."""
    kind = getattr(errors, name, None)
    is_ours = isinstance(kind, type) and issubclass(kind, errors.QLoRAError)
    return (kind if is_ours and kind else errors.QLoRAError)(message)


def _reason(status: int, wait: float) -> str:
    if hasattr(signal, "SIGALRM") and status == -signal.SIGALRM:
        return f"does not respond within {wait:.0f} seconds"
    how = signal.Signals(-status).name if status < 0 else f"status {status}"
    return f"ends its process ({how}), which is limited to {CHILD_BYTES // 2**20} MB of memory"


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):  # what is still buffered is not needed
            if pipe is not None:
                pipe.close()


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """Ends a process that this one started, not one inherited by a fork."""
    if owner != os.getpid():
        return
    process.kill()  # it has nothing to save
    _close_pipes(process)
    process.wait()


# ---- the child process ---------------------------------------------------------------------------

_MAX_MESSAGE = 1000  # characters of an error


def main(module: str) -> None:
    """Runs calls of a module's functions until the pipe closes."""
    requests, responses = _pipes()
    failure = _import(module)
    _limit()
    begin = time.process_time()
    while len(head := requests.read(REQUEST.size)) == REQUEST.size:
        size, seconds, wait = REQUEST.unpack(head)
        request = requests.read(size)
        with _timer(seconds, wait):
            response = failure or _respond(request)
        # Measured between responses: while a timer runs, Linux advances this clock in ticks, so the
        # time of a short call may only show in that of the next one.
        end = time.process_time()
        responses.write(RESPONSE.pack(len(response), end - begin) + response)
        responses.flush()
        begin = end


def _pipes() -> tuple[BinaryIO, BinaryIO]:
    """Standard input and output, which are replaced for libraries that print."""
    requests, responses = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nowhere, descriptor)
    return os.fdopen(requests, "rb"), os.fdopen(responses, "wb")


def _import(module: str) -> bytes:
    """Imports a module; returns the response to every call if that fails, else nothing."""
    try:
        importlib.import_module(f"qlora_wgpu.{module}")
    except Exception as err:
        name = module.rpartition(".")[2]
        text = f"failed to start the process for {name}: {type(err).__name__}: {err}"
        return json.dumps({"error": ["QLoRAError", text[:_MAX_MESSAGE]]}).encode()
    return b""


def _limit() -> None:
    """Limits this process's memory, and prevents it from opening files and starting processes.

    Windows has no such limits, and macOS does not enforce the one on memory: there, the parent
    process watches this one.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        import resource
    except ImportError:
        return
    memory = {"DATA": CHILD_BYTES, "AS": 2 * CHILD_BYTES}
    for name, value in {**memory, "NOFILE": 0, "NPROC": 0, "FSIZE": 0, "CORE": 0}.items():
        kind = getattr(resource, f"RLIMIT_{name}", None)
        if kind is None:
            continue
        try:
            resource.setrlimit(kind, (value, value))
        except (OSError, ValueError):  # macOS, where the process already maps more
            continue


@contextmanager
def _timer(seconds: float, wait: float) -> Iterator[None]:
    """Ends this process after a timeout, without running Python code."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, wait)  # if it sleeps
        yield
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    else:
        import faulthandler

        faulthandler.dump_traceback_later(seconds, exit=True)
        yield
        faulthandler.cancel_dump_traceback_later()


def _respond(request: bytes) -> bytes:
    try:
        function, args = pickle.loads(request)
        response: dict[str, Any] = {"value": function(*args)}
    except QLoRAError as err:
        response = {"error": [type(err).__name__, str(err)[:_MAX_MESSAGE]]}
    except MemoryError:
        response = {"stopped": f"needs more than {CHILD_BYTES // 2**20} MB of memory"}
    except Exception as err:
        response = {"error": ["QLoRAError", f"{type(err).__name__}: {err}"[:_MAX_MESSAGE]]}
    try:
        encoded = json.dumps(response, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except MemoryError:
        encoded = b'{"stopped": "needs too much memory for its result"}'
    if len(encoded) > ANSWER_BYTES:
        return json.dumps({"stopped": f"returns more than {ANSWER_BYTES // 2**20} MB"}).encode()
    return encoded
