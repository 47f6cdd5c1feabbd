"""A device that records its calls: models are laid out and filled without a GPU."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import DeviceError
from qlora_wgpu.gpu.cost_model import CostModel
from qlora_wgpu.gpu.device import DISPATCHES_PER_SUBMIT, Device, MemoryCounter, bytes_of
from qlora_wgpu.gpu.kernel_config import Profile
from qlora_wgpu.gpu.limits import buffer_bytes
from qlora_wgpu.gpu.wgsl import Shader
from qlora_wgpu.mapped_files import check_not_truncated, release_pages


@dataclass(eq=False)
class RecordedBuffer:
    """A requested buffer."""

    number: int  # its index
    label: str
    kind: str  # its kind of memory
    nbytes: int


Filled = Callable[[RecordedBuffer, int, npt.NDArray[np.uint8]], None]


class RecordingDevice(Device):
    """A device that computes nothing and cannot be read."""

    computes = False

    def __init__(self, profile: Profile, max_binding: int, filled: Filled) -> None:
        """``filled`` is called with each filled buffer, the first byte and the bytes.

        The profile must not use textures.
        """
        assert not profile.textures
        self.in_turn = threading.RLock()
        self._process = os.getpid()
        self.profile = profile
        self.limits = profile.limits
        self.features = frozenset()
        self.params_at_once = False
        self.notes = ()
        self.budget = None
        self.timeout = math.inf
        self.pace = CostModel(math.inf, math.inf, math.inf)
        self.dispatches_per_submit = DISPATCHES_PER_SUBMIT
        self.memory = MemoryCounter()
        self.buffers: list[RecordedBuffer] = []
        self._max_binding = max_binding
        self._filled = filled

    @property
    def name(self) -> str:
        return "a browser"

    @property
    def is_cpu(self) -> bool:
        return False

    @property
    def max_binding(self) -> int:
        return self._max_binding

    @property
    def max_buffer(self) -> int:
        return self._max_binding

    def driver_call(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    def buffer(
        self, nbytes: int, kind: str, label: str = "", *, bound: bool = True
    ) -> RecordedBuffer:
        nbytes = buffer_bytes(nbytes)
        made = RecordedBuffer(len(self.buffers), label, kind, nbytes)
        self._allocate(lambda: made, nbytes, self._max_binding, kind, label)
        self.buffers.append(made)
        return made

    def write(
        self,
        buffer: Any,
        data: npt.NDArray[Any] | bytes,
        offset: int = 0,
        read: Callable[[npt.NDArray[Any]], None] = check_not_truncated,
    ) -> None:
        raw = bytes_of(data)
        read(raw)
        self._filled(buffer, offset, raw)
        release_pages(raw)

    def fill(self, buffer: Any, data: npt.NDArray[Any], offset: int = 0) -> None:
        self.write(buffer, data, offset)

    def read(self, buffer: Any, nbytes: int, offset: int = 0) -> memoryview:
        raise DeviceError("results of a browser export cannot be read")

    def submit(self, *commands: Any) -> None:
        raise DeviceError("a browser export cannot be run here")

    def pipeline(self, shader: Shader) -> Shader:
        return shader

    def bind_group(self, shader: Shader, windows: dict[str, tuple[Any, int, int]]) -> Any:
        return windows
