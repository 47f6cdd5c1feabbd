"""Failures of reward functions: a time limit for those in this process, and their messages."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from qlora_wgpu.errors import RewardError
from qlora_wgpu.visible import one_line

_SIGNAL = getattr(signal, "SIGUSR2", None)  # None on Windows


class RewardTimeoutError(RewardError):
    """A reward function has exceeded its time limit."""


class _Interrupt(BaseException):
    """Raised within a function; no Exception, since functions may handle those."""


def described(err: BaseException) -> str:
    """The kind and the message of a function's exception, on one line."""
    try:
        text = one_line(str(err)[:200])
    except Exception:  # its own __str__ fails
        text = ""
    return f"{type(err).__name__}: {text}" if text else type(err).__name__


def limited(function: Callable[..., Any], name: str, seconds: float) -> Callable[..., list[Any]]:
    """The function with a time limit for each call.

    Python code is interrupted, and in the main thread also system calls that wait, such as those of
    a socket. Other native code is only interrupted when it returns.
    """

    def call(**batch: Any) -> list[Any]:
        try:
            with _interrupted_after(seconds):
                return list(function(**batch))
        except _Interrupt:
            message = f"reward function {name}: no rewards within {seconds:g} s"
            raise RewardTimeoutError(message) from None

    return call


@contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    """Raises an _Interrupt in this thread if its block takes longer."""
    is_main = threading.current_thread() is threading.main_thread()
    number = _SIGNAL if is_main else None
    thread, over, lock = threading.get_ident(), False, threading.Lock()

    def handle(*_: object) -> None:
        if not over:
            raise _Interrupt

    def fire() -> None:
        with lock:
            if over:
                return
            if number is None:
                raised = ctypes.py_object(_Interrupt)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)
            else:
                signal.pthread_kill(thread, number)

    before = None if number is None else signal.signal(number, handle)
    timer = threading.Timer(seconds, fire)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            over = True
        timer.cancel()
        if number is not None:
            signal.signal(number, signal.SIG_DFL if before is None else before)
