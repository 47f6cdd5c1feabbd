"""An open GPU: memory counted by kind, transfers, and pipelines compiled once."""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import OutOfMemoryError
from qlora_wgpu.gpu import limits
from qlora_wgpu.gpu.adapters import (
    choose_adapter,
    rows_of_products,
    wants_short_loops,
    wants_textures,
)
from qlora_wgpu.gpu.cost_model import CostModel
from qlora_wgpu.gpu.driver import driver_call, note_opened, refuse_fork, refuse_inherited
from qlora_wgpu.gpu.kernel_config import (
    CPU_PROFILE,
    Profile,
    cpu_profile,
    gpu_profile,
    has_few_registers,
    hoists_loads,
    takes_deep_tiles,
)
from qlora_wgpu.gpu.limits import (
    TEXTURE_PITCH,
    TEXTURE_ROW,
    TEXTURE_WIDTH,
    buffer_bytes,
    texture_bytes,
)
from qlora_wgpu.gpu.matrix import Limits
from qlora_wgpu.gpu.probe import try_matrix_units, try_subgroups
from qlora_wgpu.gpu.wgsl import Shader, hoist_uniform_loads
from qlora_wgpu.mapped_files import check_not_truncated, release_pages


@dataclass
class MemoryCounter:
    """Bytes of live buffers by kind, and their peak."""

    by_kind: Counter[str] = field(default_factory=Counter)
    peak: int = 0
    _counts: bool = True

    def add(self, kind: str, nbytes: int, holder: Any) -> None:
        """Counts ``nbytes`` more of a kind, for as long as ``holder`` lives."""
        if not self._counts:
            return
        self.by_kind[kind] += nbytes
        self.peak = max(self.peak, self.total)
        weakref.finalize(holder, self._freed, kind, nbytes).atexit = False

    def _freed(self, kind: str, nbytes: int) -> None:
        self.by_kind[kind] -= nbytes

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Within the context, allocations are not counted, since they are temporary."""
        before, self._counts = self._counts, False
        try:
            yield
        finally:
            self._counts = before

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())


UPLOAD_CHUNK = 16 << 20  # bytes per write: unsubmitted writes accumulate in host memory


def bytes_of(data: npt.NDArray[Any] | bytes) -> npt.NDArray[np.uint8]:
    if isinstance(data, np.ndarray):
        return np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return np.frombuffer(data, np.uint8)


class Transfers:
    """The part of a device that moves bytes."""

    raw: Any  # WebGPU's device
    _unsubmitted = 0  # bytes written since the last submit
    _under_way = 0  # bytes that the driver may still hold in host memory

    def driver_call(self, what: str) -> AbstractContextManager[None]:
        """The context for every call into the driver that may wait or fail; ``what`` names it."""
        raise NotImplementedError

    def submit(self, *commands: Any) -> None:
        """Submits command buffers; does not wait."""
        self._unsubmitted = 0
        with self.driver_call("submitting work"):
            self.raw.queue.submit(list(commands))

    def write(
        self,
        buffer: Any,
        data: npt.NDArray[Any] | bytes,
        offset: int = 0,
        read: Callable[[npt.NDArray[Any]], None] = check_not_truncated,
    ) -> None:
        """Copies host data into a buffer, in pieces to limit host memory.

        A mapped file's pages are released after each piece.
        """
        raw = bytes_of(data)
        if raw.size % 4:
            raw = np.pad(raw, (0, -raw.size % 4))
        for start in range(0, raw.size, UPLOAD_CHUNK):
            piece = raw[start : start + UPLOAD_CHUNK]
            read(piece)
            with self.driver_call("uploading data"):
                self.raw.queue.write_buffer(buffer, offset + start, piece)
            release_pages(piece)
            self._unsubmitted += piece.size
            self._under_way += piece.size
            if self._unsubmitted >= UPLOAD_CHUNK:
                self.submit()

    def fill(self, buffer: Any, data: npt.NDArray[Any], offset: int = 0) -> None:
        """Fills a new buffer, or a part of one, and waits if much is in flight.

        Otherwise the driver's staging copies would fragment memory between permanent buffers.
        """
        self.write(buffer, data, offset)
        if self._under_way >= UPLOAD_CHUNK:
            self.read(buffer, 4)

    def read(self, buffer: Any, nbytes: int, offset: int = 0) -> memoryview:
        """Waits for all submitted work and copies bytes back."""
        padded = nbytes + -nbytes % 4
        with self.driver_call("reading a result"):
            data: memoryview = self.raw.queue.read_buffer(buffer, offset, padded)
        self._under_way = 0
        return data[:nbytes]

    def write_texture(self, texture: Any, data: npt.NDArray[Any]) -> None:
        """Fills a texture from its first texel on, in pieces to limit host memory."""
        flat = bytes_of(data)
        rows = UPLOAD_CHUNK // TEXTURE_ROW
        for row in range(0, -(-flat.size // TEXTURE_ROW), rows):
            piece = flat[row * TEXTURE_ROW : (row + rows) * TEXTURE_ROW]
            height = -(-piece.size // TEXTURE_ROW)
            check_not_truncated(piece)
            with self.driver_call("uploading data"):
                self.raw.queue.write_texture(
                    {"texture": texture, "origin": (0, row, 0)},
                    np.pad(piece, (0, height * TEXTURE_ROW - piece.size)),
                    {"bytes_per_row": TEXTURE_ROW, "rows_per_image": height},
                    (TEXTURE_WIDTH, height, 1),
                )
            release_pages(piece)
            self._under_way += piece.size
            self.submit()
            if self._under_way >= UPLOAD_CHUNK:
                self.read_texture(texture, 4)

    def read_texture(self, texture: Any, nbytes: int, offset: int = 0) -> memoryview:
        """Waits for all submitted work and copies a texture's bytes back."""
        first, last = offset // TEXTURE_ROW, -(-(offset + nbytes) // TEXTURE_ROW)
        with self.driver_call("reading a result"):
            data: memoryview = self.raw.queue.read_texture(
                {"texture": texture, "origin": (0, first, 0)},
                {"bytes_per_row": TEXTURE_ROW, "rows_per_image": last - first},
                (TEXTURE_WIDTH, last - first, 1),
            )
        self._under_way = 0
        start = offset - first * TEXTURE_ROW
        return data.cast("B")[start : start + nbytes]


# Seconds. On Metal, wgpu waits forever for work that macOS has aborted (wgpu 9531), so little is
# under way at once.
_TIMEOUT, _METAL_TIMEOUT = 1800.0, 120.0
_SUBMITS_AT_ONCE = 100  # on Metal
DISPATCHES_PER_SUBMIT = 100  # so that the GPU starts while the host still encodes
SUBMIT_MILLISECONDS = 100.0  # see ``CostModel``


class Device(Transfers):
    """A GPU device and its queue.

    Attributes:
        backend: The WebGPU implementation.
        gpu: The GPU, which WebGPU calls an adapter.
        raw: WebGPU's device.
        features: The used features of the device, by WebGPU's names.
        params_at_once: Whether shaders start by reading all their parameters.
        memory: Bytes allocated on the device, by kind.
        limits: The GPU's limits of a workgroup.
        profile: The kernels' configuration for this kind of GPU.
        notes: Notes for the user on that choice.
        dispatches_per_submit: After how many dispatches work is submitted.
        pace: The cost model, with the time that a submit may take.
        timeout: Seconds after which a call into the driver is considered hung.
        budget: Maximum bytes of device memory; None for no limit.
        in_turn: A lock for operations that must not interleave: programs share memory.
        computes: Whether it runs programs; a recording device does not.
    """

    computes = True

    def __init__(
        self,
        gpu: str = "auto",
        backend: str = "auto",
        *,
        dispatches_per_submit: int = DISPATCHES_PER_SUBMIT,
        submit_milliseconds: float = SUBMIT_MILLISECONDS,
        timeout: float | None = None,
        memory: int | None = None,
    ) -> None:
        """Opens a device.

        Args:
            gpu: ``"auto"``, an index, or part of a name, as ``qlora-wgpu doctor`` lists them.
            backend: ``"auto"``, ``"wgpu"`` or ``"dawn"``.
            dispatches_per_submit: After how many dispatches work is submitted.
            submit_milliseconds: After how many milliseconds of work it is submitted, on hardware
                GPUs.
            timeout: Seconds after which a call into the driver is considered hung; None is half an
                hour, two minutes on Metal, or no limit for a software GPU, which may be slow but
                cannot hang.
            memory: Maximum bytes of device memory; None for no limit.
        """
        self.in_turn = threading.RLock()
        self._process = os.getpid()
        refuse_fork()
        chosen = choose_adapter(gpu, backend)
        self.backend = chosen.backend
        self.gpu = chosen.raw
        self.dispatches_per_submit = dispatches_per_submit
        self.pace = CostModel.of_kind(self.gpu.info["adapter_type"], 1e-3 * submit_milliseconds)
        self.budget = memory
        self.timeout = timeout or self._usual_timeout()
        limits.require_limits(self.name, self.gpu.limits)
        self.features = frozenset(self.backend.features_of(self.gpu))
        with self.driver_call("opening it"):
            self.raw = self.backend.request_device(self.gpu)
        note_opened()
        weakref.finalize(self, self.backend.release, self.raw).atexit = False
        self.memory = MemoryCounter()
        self.params_at_once = self.is_cpu and not self.backend.proves_uniformity
        self._pipelines: dict[str, Any] = {}
        own = self.raw.limits
        self.limits = Limits(
            limits.most_invocations(own), int(own["max-compute-workgroup-storage-size"])
        )
        self.profile = CPU_PROFILE
        self.notes: tuple[str, ...] = ()
        self._submits = 0
        self._broadcasting = 0  # the subgroup size that broadcasts rely on
        with self.memory.uncounted():
            self.profile = self._choose_profile()

    def driver_call(self, what: str) -> AbstractContextManager[None]:
        refuse_inherited(self._process, self.name)
        return driver_call(self.name, what, self.timeout)

    @property
    def name(self) -> str:
        return str(self.gpu.info["device"])

    @property
    def is_cpu(self) -> bool:
        """Whether this is a software GPU, which needs kernels without workgroup memory."""
        return bool(self.gpu.info["adapter_type"] == "CPU")

    @property
    def _is_metal(self) -> bool:
        return bool(self.gpu.info["backend_type"] == "Metal")

    def _usual_timeout(self) -> float:
        return math.inf if self.is_cpu else _METAL_TIMEOUT if self._is_metal else _TIMEOUT

    def submit(self, *commands: Any) -> None:
        """Submits command buffers; waits for all of them now and then on Metal."""
        super().submit(*commands)
        self._submits += 1
        if self._is_metal and self._submits % _SUBMITS_AT_ONCE == 0:
            self.read(self._marker, 4)  # wgpu-py 0.32 has no other way to wait that works

    @cached_property
    def _marker(self) -> Any:  # which is in no budget
        return self.raw.create_buffer(size=4, usage=self.backend.module.BufferUsage.COPY_SRC)

    def _choose_profile(self) -> Profile:
        if self.is_cpu:
            self._broadcasting, problem = try_subgroups(self)
            self.notes = (problem,) if problem else ()
            lanes = self._broadcasting
            return cpu_profile(
                lanes,
                rows_of_products(lanes),
                in_textures=wants_textures(lanes),
                short_loops=wants_short_loops(lanes),
            )
        units = try_matrix_units(self)
        if units.refusal:
            self.notes = (
                f"the matrix units of {self.name} are not used: {units.refusal}; products use "
                "workgroup memory instead",
            )
        info = self.gpu.info
        profile = gpu_profile(
            units.shape, self.limits, few_registers=has_few_registers(info),
            hoists_loads=hoists_loads(info), deep_tiles=takes_deep_tiles(info),
        )  # fmt: skip
        return replace(profile, gemm_kind="tiled") if units.refusal else profile

    @property
    def max_binding(self) -> int:
        """The maximum bytes of a binding, buffer or texture."""
        return limits.most_bytes(self.raw.limits, in_textures=self.profile.textures)

    @property
    def max_texture(self) -> int:
        """The maximum bytes of a texture."""
        return TEXTURE_ROW * int(self.raw.limits["max-texture-dimension-2d"])

    @property
    def max_buffer(self) -> int:
        """The maximum bytes of a buffer, of which a binding may be a part."""
        return int(self.raw.limits["max-buffer-size"])

    def buffer(self, nbytes: int, kind: str, label: str = "", *, bound: bool = True) -> Any:
        """Allocates a zeroed storage buffer of whole words; if not ``bound``, only windows are."""
        nbytes = buffer_bytes(nbytes)
        usage = self.backend.module.BufferUsage
        flags = usage.STORAGE | usage.COPY_DST | usage.COPY_SRC | usage.UNIFORM
        return self._allocate(
            lambda: self.raw.create_buffer(size=nbytes, usage=flags, label=label),
            nbytes,
            self.max_binding if bound else self.max_buffer,
            kind,
            label,
        )

    def texture(self, nbytes: int, kind: str, label: str = "") -> Any:
        """Allocates a storage texture of 16-byte texels, with ``TEXTURE_WIDTH`` used per row."""
        nbytes = texture_bytes(nbytes)
        usage = self.backend.module.TextureUsage
        flags = usage.STORAGE_BINDING | usage.COPY_DST | usage.COPY_SRC
        return self._allocate(
            lambda: self.raw.create_texture(
                size=(TEXTURE_PITCH // 16, nbytes // TEXTURE_PITCH, 1),
                format="rgba32uint",
                usage=flags,
                label=label,
            ),
            nbytes,
            TEXTURE_PITCH * int(self.raw.limits["max-texture-dimension-2d"]),
            kind,
            label,
        )

    def _allocate(
        self, make: Callable[[], Any], nbytes: int, most: int, kind: str, label: str
    ) -> Any:
        if nbytes > most:
            raise OutOfMemoryError(
                f"{label or kind} needs {nbytes:,} bytes in one piece, but {self.name} allows at "
                f"most {most:,}: lower the batch size or data.max_seq_length"
            )
        if self.budget is not None and self.memory.total + nbytes > self.budget:
            raise OutOfMemoryError(
                f"{label or kind} needs {nbytes:,} bytes in addition to the {self.memory.total:,} "
                f"in use, but device.memory allows {self.budget:,}: raise it, or lower the batch "
                "size or data.max_seq_length"
            )
        try:
            with self.driver_call(f"allocating {label or kind}"):
                memory = make()
        except OutOfMemoryError as err:
            raise OutOfMemoryError(
                f"{self.name} is out of memory: cannot allocate {nbytes:,} bytes for "
                f"{label or kind} in addition to {self.memory.total:,}; lower the batch size or "
                "data.max_seq_length, or enable train.gradient_checkpointing"
            ) from err
        self.memory.add(kind, nbytes, memory)
        return memory

    def pipeline(self, shader: Shader) -> Any:
        pipeline = self._pipelines.get(shader.label)
        if pipeline is None:
            with self.driver_call(f"compiling {shader.label}"):
                pipeline = self._compile(shader)
            self._pipelines[shader.label] = pipeline
        return pipeline

    def _compile(self, shader: Shader) -> Any:
        code = hoist_uniform_loads(shader.code) if self.params_at_once else shader.code
        code = self.backend.dialect(code, self._pinned_size(shader))
        module = self.backend.compile(self.raw, code, shader.label)
        return self.raw.create_compute_pipeline(
            layout="auto", compute={"module": module, "entry_point": "main"}
        )

    def _pinned_size(self, shader: Shader) -> int:
        """The subgroup size to request, if this GPU supports that; else 0."""
        if "subgroup-size-control" not in self.features:
            return 0
        return shader.subgroup_size or self._broadcasting

    def dispatch(self, pipeline: Any, group: Any, workgroups: tuple[int, int, int]) -> None:
        """Runs one kernel in its own submit."""
        with self.driver_call("recording work"):
            encoder = self.raw.create_command_encoder()
            compute = encoder.begin_compute_pass()
            compute.set_pipeline(pipeline)
            compute.set_bind_group(0, group)
            compute.dispatch_workgroups(*workgroups)
            compute.end()
            commands = encoder.finish()
        self.submit(commands)

    def bind_group(self, shader: Shader, windows: dict[str, tuple[Any, int, int]]) -> Any:
        """Binds windows ``(buffer, offset, nbytes)``, or whole textures, to a shader's names."""
        indices = {name: binding.index for name, binding in shader.bindings.items()}
        if shader.params:
            indices["params"] = 0
        entries: list[dict[str, Any]] = []
        for name, (memory, offset, size) in windows.items():
            texture = name in shader.bindings and shader.bindings[name].texture
            resource = (
                memory.create_view()
                if texture
                else {"buffer": memory, "offset": offset, "size": size}
            )
            entries.append({"binding": indices[name], "resource": resource})
        with self.driver_call(f"binding {shader.label}"):
            layout = self.pipeline(shader).get_bind_group_layout(0)
            return self.raw.create_bind_group(layout=layout, entries=entries, label=shader.label)
