"""Calls into the driver: how long the present one takes, and what its errors mean."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from qlora_wgpu.errors import DeviceError, DeviceLostError, OutOfMemoryError, QLoRAError

_HEADINGS = ("", "Validation Error", "Caused by:")


@dataclass(frozen=True)
class _Call:
    what: str
    began: float
    timeout: float


_present: _Call | None = None  # one process drives one GPU, from one thread


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
    """Times what is done inside, and turns a driver's errors into this package's.

    Args:
        gpu: The GPU's name.
        what: What is done, such as ``"reading a result"``.
        timeout: Seconds after which ``overdue_call`` names it.

    Raises:
        OutOfMemoryError: If the GPU has no memory left.
        DeviceLostError: If it has stopped working.
        DeviceError: If the driver refuses the call for another reason.
    """
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
