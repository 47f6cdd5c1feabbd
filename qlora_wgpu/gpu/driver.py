"""Calls into the driver: timeouts, explained errors, and remembered crashes."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from qlora_wgpu.cache_folder import cache_path, is_own, make_cache_folder
from qlora_wgpu.errors import DeviceError, DeviceLostError, OutOfMemoryError, QLoRAError
from qlora_wgpu.files import file_text
from qlora_wgpu.limits import OWN_JSON_BYTES
from qlora_wgpu.supervision.processes import is_running, own_number

# ---- timing and errors -----------------------------------------------------------------------

_HEADINGS = ("", "Validation Error", "Caused by:")


@dataclass(frozen=True)
class _Call:
    what: str
    began: float
    timeout: float


_present: _Call | None = None  # one at a time: a process drives one GPU, from one thread


def overdue_call() -> str | None:
    """The call into the driver that has exceeded its timeout; None if there is none."""
    call = _present
    if call is None or time.monotonic() - call.began < call.timeout:
        return None
    return (
        f"no response for {call.timeout:,.0f} s while {call.what}; if it is only slow, raise "
        "device.timeout"
    )


@contextmanager
def driver_call(gpu: str, what: str, timeout: float = float("inf")) -> Iterator[None]:
    global _present
    outer, _present = _present, _Call(what, time.monotonic(), timeout)
    try:
        yield
    except QLoRAError:
        raise
    except Exception as err:
        raise _explained(gpu, what, err) from err
    finally:
        _present = outer


def _explained(gpu: str, what: str, error: Exception) -> DeviceError:
    if _is_out_of_memory(error):
        return OutOfMemoryError(
            f"{gpu} ran out of memory while {what}: lower the batch size or data.max_seq_length, "
            "or close other programs that use it"
        )
    if "lost" in str(error).lower():
        return DeviceLostError(
            f"{gpu} was lost while {what}: the driver was reset, or aborted work that took too "
            "long; lower device.submit_milliseconds"
        )
    return DeviceError(f"{gpu} failed while {what}: {_reason(error)}")


def _reason(error: Exception) -> str:
    lines = (line.strip() for line in str(error).splitlines())
    return " ".join(line for line in lines if line not in _HEADINGS) or type(error).__name__


def _is_out_of_memory(error: Exception) -> bool:
    text = f"{type(error).__name__} {error}".lower()
    return "not enough memory" in text or "out of memory" in text or "outofmemory" in text


# ---- forks -----------------------------------------------------------------------------------

_SPAWN = 'start the process with "spawn", and open the model in it'
_processes: set[int] = set()  # with an open device: this one, and those it was forked from


def note_opened() -> None:
    _processes.add(os.getpid())


def refuse_fork() -> None:
    """Refuses to open a device in a fork of a process that has opened one."""
    if _processes - {os.getpid()}:
        raise DeviceError(f"cannot open a GPU in a process forked after a GPU was opened: {_SPAWN}")


def refuse_inherited(process: int, name: str) -> None:
    """Refuses a call into a device that was inherited by a fork."""
    if os.getpid() != process:
        raise DeviceError(
            f"{name} cannot be used in this process, which was forked after it was opened: {_SPAWN}"
        )


# ---- crashes ---------------------------------------------------------------------------------

CRASHES = 2  # after which a probe is not tried again: a single one may have another cause

listeners: list[Callable[[str], None]] = []  # called with what is running, and "" at its end


def has_crashed(what: str) -> bool:
    """Whether two processes crashed within this probe."""
    mark = _mark(what)
    if not is_own(mark):
        return False
    try:
        numbers = file_text(mark, OWN_JSON_BYTES).split()
    except (OSError, ValueError):
        return False
    gone = [number for number in numbers if number.isdigit() and not is_running(int(number))]
    return len(gone) >= CRASHES


@contextmanager
def guarded_probe(what: str, doing: str) -> Iterator[None]:
    """Marks a probe that may crash the process while it runs; calls listeners with ``doing``.

    Some drivers' compilers crash instead of reporting an error. So the process stores its id in the
    user's cache meanwhile: ids of processes that no longer run are crashes. ``what`` names the
    probe and the driver.
    """
    mark = _mark(what)
    with suppress(OSError):  # without a cache, crashes are not remembered
        make_cache_folder(mark.parent)
        with mark.open("a", encoding="ascii") as file:
            file.write(f"{own_number()}\n")
    try:
        with under_way(doing):
            yield
    finally:
        with suppress(OSError):
            mark.unlink(missing_ok=True)


@contextmanager
def under_way(doing: str) -> Iterator[None]:
    """Reports to listeners what is running, in case the process crashes."""
    _tell(doing)
    try:
        yield
    finally:
        _tell("")


def _tell(doing: str) -> None:
    for listener in listeners:
        listener(doing)


def _mark(what: str) -> Path:
    return cache_path("attempts", hashlib.sha256(what.encode()).hexdigest()[:16])
