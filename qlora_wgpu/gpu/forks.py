"""A process that was forked after a GPU was opened: its driver would never answer."""

from __future__ import annotations

import os

from qlora_wgpu.errors import DeviceError

_SPAWN = 'start the process with "spawn", and open the model in it'
_processes: set[int] = set()  # that have opened a device: this one, and those it is a fork of


def note_opened() -> None:
    """Notes that this process has opened a device."""
    _processes.add(os.getpid())


def refuse_fork() -> None:
    """Refuses to open a device where an older one was inherited.

    Raises:
        DeviceError: If this is a fork of a process that has opened one.
    """
    if _processes - {os.getpid()}:
        raise DeviceError(
            f"a GPU was opened before this process was forked, where none can be opened: {_SPAWN}"
        )


def refuse_inherited(process: int, name: str) -> None:
    """Refuses a call into a device that was inherited.

    Args:
        process: The process that opened it.
        name: The GPU's name.

    Raises:
        DeviceError: If that is not this process.
    """
    if os.getpid() != process:
        raise DeviceError(
            f"{name} was opened before this process was forked, where it does not work: {_SPAWN}"
        )
