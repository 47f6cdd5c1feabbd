"""An opened GPU: buffers with their bytes counted by kind, pipelines compiled once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import DeviceError, OutOfMemoryError
from qlora_wgpu.gpu import backend
from qlora_wgpu.gpu.profile import CPU_PROFILE, GPU_PROFILE, Profile
from qlora_wgpu.gpu.wgsl import Shader

ALIGNMENT = 256  # of buffer windows: the most any adapter asks for
_UPLOAD_CHUNK = 16 << 20  # unsubmitted writes pile up in host memory
_MAX_WORKGROUPS = 65_535


@dataclass
class MemoryCounter:
    """Bytes of live buffers by kind, and the most there ever were."""

    by_kind: Counter[str] = field(default_factory=Counter)
    peak: int = 0

    def add(self, kind: str, nbytes: int) -> None:
        """Counts ``nbytes`` more (or fewer, if negative) of a kind."""
        self.by_kind[kind] += nbytes
        self.peak = max(self.peak, self.total)

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.by_kind.values())


class Device:
    """A GPU device and its queue.

    Attributes:
        memory: What has been allocated here, by kind.
    """

    def __init__(self, adapter: str = "auto") -> None:
        """Opens a device.

        Args:
            adapter: ``"auto"``, an index, or part of a name, as ``qlora-wgpu doctor`` lists them.

        Raises:
            DeviceError: If no such adapter can be opened.
        """
        self._wgpu = backend.webgpu()
        self.adapter = backend.choose_adapter(adapter)
        self.raw = backend.request_device(self.adapter)
        self.memory = MemoryCounter()
        self._pipelines: dict[str, Any] = {}

    @property
    def name(self) -> str:
        """The adapter's name."""
        return str(self.adapter.info["device"])

    @property
    def is_cpu(self) -> bool:
        """Whether this is a software adapter, which wants kernels without workgroup memory."""
        return bool(self.adapter.info["adapter_type"] == "CPU")

    @property
    def profile(self) -> Profile:
        """How kernels are cut for this kind of adapter."""
        return CPU_PROFILE if self.is_cpu else GPU_PROFILE

    @property
    def max_binding(self) -> int:
        """The largest number of bytes that one binding may show to a shader."""
        limits = self.raw.limits
        return int(min(limits["max-storage-buffer-binding-size"], limits["max-buffer-size"]))

    def buffer(self, nbytes: int, kind: str, label: str = "") -> Any:
        """Allocates a zeroed storage buffer.

        Args:
            nbytes: Its size; rounded up to a multiple of four.
            kind: What it is counted as in ``memory``.
            label: For the driver's messages.

        Raises:
            OutOfMemoryError: If it exceeds a limit of the adapter or the memory that is left.
        """
        nbytes = buffer_bytes(nbytes)
        if nbytes > self.max_binding:
            raise OutOfMemoryError(
                f"{label or kind} needs {nbytes:,} bytes in one buffer, and {self.name} allows "
                f"{self.max_binding:,}: lower the batch size or data.max_seq_length"
            )
        usage = self._wgpu.BufferUsage
        flags = usage.STORAGE | usage.COPY_DST | usage.COPY_SRC | usage.UNIFORM
        try:
            buffer = self.raw.create_buffer(size=nbytes, usage=flags, label=label)
        except Exception as err:
            if backend.is_out_of_memory(err):
                raise OutOfMemoryError(
                    f"{self.name} has no memory for {label or kind} ({nbytes:,} bytes, after "
                    f"{self.memory.total:,}): lower the batch size or data.max_seq_length, or "
                    "turn on train.gradient_checkpointing"
                ) from err
            raise DeviceError(f"{self.name} refused {label or kind}: {err}") from err
        self.memory.add(kind, nbytes)
        return buffer

    def write(self, buffer: Any, data: npt.NDArray[Any] | bytes, offset: int = 0) -> None:
        """Copies host data into a buffer, in pieces so that host memory stays flat."""
        raw: Any = np.ascontiguousarray(data) if isinstance(data, np.ndarray) else data
        view = memoryview(raw)
        view = view.cast("B") if view.nbytes else view
        if view.nbytes % 4:
            view = memoryview(view.tobytes() + bytes(-view.nbytes % 4))
        for start in range(0, view.nbytes, _UPLOAD_CHUNK):
            piece = view[start : start + _UPLOAD_CHUNK]
            self.raw.queue.write_buffer(buffer, offset + start, piece)
            if view.nbytes > _UPLOAD_CHUNK:
                self.raw.queue.submit([])

    def read(self, buffer: Any, nbytes: int, offset: int = 0) -> memoryview:
        """Waits for all submitted work and copies bytes back."""
        padded = nbytes + -nbytes % 4
        data: memoryview = self.raw.queue.read_buffer(buffer, offset, padded)
        return data[:nbytes]

    def pipeline(self, shader: Shader) -> Any:
        """Compiles a shader, once."""
        found = self._pipelines.get(shader.label)
        if found is None:
            try:
                module = self.raw.create_shader_module(code=shader.code, label=shader.label)
                found = self.raw.create_compute_pipeline(
                    layout="auto", compute={"module": module, "entry_point": "main"}
                )
            except Exception as err:
                raise DeviceError(f"{self.name} cannot compile {shader.label}: {err}") from err
            self._pipelines[shader.label] = found
        return found

    def bind_group(self, shader: Shader, windows: dict[str, tuple[Any, int, int]]) -> Any:
        """Binds buffer windows ``(buffer, offset, nbytes)`` to a shader's names."""
        indices = {name: binding.index for name, binding in shader.bindings.items()}
        if shader.params:
            indices["params"] = 0
        entries = [
            {"binding": indices[name], "resource": {"buffer": b, "offset": offset, "size": size}}
            for name, (b, offset, size) in windows.items()
        ]
        layout = self.pipeline(shader).get_bind_group_layout(0)
        return self.raw.create_bind_group(layout=layout, entries=entries, label=shader.label)


def buffer_bytes(nbytes: int) -> int:
    """What a buffer for so many bytes takes."""
    return max(nbytes + -nbytes % 4, 16)


def fold_workgroups(count: int) -> tuple[int, int, int]:
    """Spreads a one-dimensional count of workgroups over x and y within WebGPU's limit.

    Shaders recover the index as ``workgroup_id.y * num_workgroups.x + workgroup_id.x`` and must
    return where it lies past their end.
    """
    if count <= _MAX_WORKGROUPS:
        return (max(count, 1), 1, 1)
    rows = -(-count // _MAX_WORKGROUPS)
    return (-(-count // rows), rows, 1)
