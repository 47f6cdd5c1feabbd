"""Devices that tests open are one device of the driver, with the kernels compiled for it.

A run opens a device of its own, and would compile each kernel again: half of what tests of runs
cost. What is shared lies below ``Device``, which counts its own memory and chooses its own profile.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from contextlib import suppress
from typing import Any

import pytest

from qlora_wgpu.gpu.backend import Backend, checks_everything
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.wgpu_native import WgpuNative

MOST_PIPELINES = 400
"""How many compiled kernels stay, of some 3 to 6 MB each on a software GPU."""

_opened: dict[tuple[Any, ...], Any] = {}
_pipelines: dict[tuple[Any, ...], Any] = {}
_devices: weakref.WeakSet[Device] = weakref.WeakSet()


def share_devices(patch: pytest.MonkeyPatch) -> None:
    """Has all devices of one GPU with the same limits and features be one, in each thread."""
    request, compile_ = WgpuNative.request_device, Device._compile

    def request_device(self: Backend, adapter: Any) -> Any:
        key = (
            threading.get_ident(), *sorted(adapter.info.items()), *sorted(adapter.limits.items()),
            frozenset(adapter.features), frozenset(self.features), type(self),
        )  # fmt: skip
        if key not in _opened:
            _opened[key] = request(self, adapter)
        return _opened[key]

    def compiled(self: Device, shader: Any) -> Any:
        _devices.add(self)
        key = (
            self.raw, checks_everything(), self.params_at_once, self._pinned_size(shader),
            shader.code,
        )  # fmt: skip
        if key not in _pipelines:
            _pipelines[key] = compile_(self, shader)
        return _pipelines[key]

    patch.setattr(WgpuNative, "request_device", request_device)
    patch.setattr(WgpuNative, "release", lambda self, raw: None)
    patch.setattr(Device, "_compile", compiled)


def bound_pipelines() -> None:
    """Lets go of compiled kernels where there are many, which would be gigabytes in the end."""
    if len(_pipelines) <= MOST_PIPELINES:
        return
    _pipelines.clear()
    for device in _devices:
        device._pipelines.clear()
    gc.collect()
    for raw in _opened.values():  # drivers let go while they are waited for
        raw.queue.read_buffer(raw.create_buffer(size=4, usage="COPY_SRC"), 0, 4)
    with suppress(OSError, AttributeError):  # glibc keeps what is free otherwise
        ctypes.CDLL("libc.so.6").malloc_trim(0)
