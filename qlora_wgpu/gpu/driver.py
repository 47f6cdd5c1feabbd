"""Calls into the driver: timed, with errors explained, and with a memory of crashes."""

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
    """Which call into the driver has not returned in its time; None if there is none."""
    call = _present
    if call is None or time.monotonic() - call.began < call.timeout:
        return None
    return (
        f"no answer for {call.timeout:,.0f} s while {call.what}; if it is only slow, set "
        "device.timeout to more"
    )


@contextmanager
def driver_call(gpu: str, what: str, timeout: float = float("inf")) -> Iterator[None]:
    """Times what is done inside, and turns a driver's errors into this package's."""
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
            f"{gpu} was lost while {what}: its driver was reset, or ended work that took too long; "
            "lower device.submit_milliseconds"
        )
    return DeviceError(f"{gpu} failed while {what}: {_reason(error)}")


def _reason(error: Exception) -> str:
    lines = (line.strip() for line in str(error).splitlines())
    return " ".join(line for line in lines if line not in _HEADINGS) or type(error).__name__


def _is_out_of_memory(error: Exception) -> bool:
    """Whether an error of the WebGPU module means that the device has no memory left."""
    text = f"{type(error).__name__} {error}".lower()
    return "not enough memory" in text or "out of memory" in text or "outofmemory" in text


# ---- forks -----------------------------------------------------------------------------------

_SPAWN = 'start the process with "spawn", and open the model in it'
_processes: set[int] = set()  # that have opened a device: this one, and those it is a fork of


def note_opened() -> None:
    """Notes that this process has opened a device."""
    _processes.add(os.getpid())


def refuse_fork() -> None:
    """Refuses to open a device where an older one was inherited."""
    if _processes - {os.getpid()}:
        raise DeviceError(
            f"a GPU was opened before this process was forked, where none can be opened: {_SPAWN}"
        )


def refuse_inherited(process: int, name: str) -> None:
    """Refuses a call into a device that was inherited."""
    if os.getpid() != process:
        raise DeviceError(
            f"{name} was opened before this process was forked, where it does not work: {_SPAWN}"
        )


# ---- crashes ---------------------------------------------------------------------------------

CRASHES = 2  # after which a probe is not tried again: one may have had another cause

listeners: list[Callable[[str], None]] = []  # told what is under way, and "" when it is not


def has_crashed(what: str) -> bool:
    """Whether processes ended within this probe, twice."""
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
    """Remembers a probe that may crash the process, until it is over; listeners hear ``doing``.

    Compilers of some drivers crash where they should refuse, and the process cannot say so
    afterwards. So it leaves its number in the user's cache meanwhile: numbers of processes that no
    longer run are crashes. ``what`` names the probe and the driver.
    """
    mark = _mark(what)
    with suppress(OSError):  # without a cache a crash is not remembered
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
    """Tells the listeners what is under way, should the process crash."""
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
