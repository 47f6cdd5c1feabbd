"""An opened GPU: buffers with their bytes counted by kind, pipelines compiled once."""

from __future__ import annotations

import math
import os
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import DeviceError, OutOfMemoryError
from qlora_wgpu.gpu.adapters import choose_adapter
from qlora_wgpu.gpu.calls import driver_call
from qlora_wgpu.gpu.matrix import Limits
from qlora_wgpu.gpu.memory_counter import MemoryCounter
from qlora_wgpu.gpu.pace import Pace
from qlora_wgpu.gpu.probe import matrix_units, subgroup_size
from qlora_wgpu.gpu.profile import Profile, cpu_profile, gpu_profile
from qlora_wgpu.gpu.uniforms import read_at_once
from qlora_wgpu.gpu.wgsl import Shader
from qlora_wgpu.mapped_files import let_go, require_whole

ALIGNMENT = 256  # of buffer windows: the most any GPU asks for
TEXTURE_WIDTH = 1024  # texels; shaders/common/texel.wgsl has it too
_TEXTURE_ROW = 16 * TEXTURE_WIDTH  # bytes
_FREE_ROWS = 8192  # the least height that any device allows
UPLOAD_CHUNK = 16 << 20  # unsubmitted writes pile up in host memory
_TIMEOUT = 1800.0  # seconds
# So that the GPU begins while the host still encodes.
DISPATCHES_PER_SUBMIT = 100
# Desktop systems end work that takes too long: some of them after a few hundred milliseconds.
SUBMIT_MILLISECONDS = 100.0


_SPAWN = 'start the process with "spawn", and open the model in it'
_processes: set[int] = set()  # that have opened a device: this one, and those it is a fork of


def _refuse_fork() -> None:
    """Refuses to open a device where an older one was inherited: the driver would never answer.

    Raises:
        DeviceError: If this is a fork of a process that has opened one.
    """
    if _processes - {os.getpid()}:
        raise DeviceError(
            f"a GPU was opened before this process was forked, where none can be opened: {_SPAWN}"
        )


class Device:
    """A GPU device and its queue.

    Attributes:
        backend: The WebGPU implementation.
        gpu: The GPU, which WebGPU calls an adapter.
        raw: WebGPU's device.
        features: Features of the device that are used, by WebGPU's names.
        params_at_once: Whether shaders begin with reading all their parameters.
        memory: Bytes allocated on the device, by kind.
        limits: What the GPU allows a workgroup.
        profile: How kernels are cut for this kind of GPU.
        notes: What a user should know of that choice.
        dispatches_per_submit: After how many dispatches work is handed to the driver.
        pace: How long work takes, and how much time of it the driver gets at once.
        timeout: Seconds after which a call into the driver counts as hung.
        budget: Bytes that may be taken of it; None for as much as there is.
        in_turn: Held by a thread for what another must not come between: programs share memory.
        computes: Whether programs can run on it: one that only writes them down has no results.
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
        adapter: str | None = None,
    ) -> None:
        """Opens a device.

        Args:
            gpu: ``"auto"``, an index, or part of a name, as ``qlora-wgpu doctor`` lists them.
            backend: ``"auto"``, ``"wgpu"`` or ``"dawn"``.
            dispatches_per_submit: After how many dispatches work is handed to the driver.
            submit_milliseconds: After how much work of this time it is, on a GPU that is no
                software.
            timeout: Seconds after which a call into the driver counts as hung; None is half an
                hour, and no limit for a software GPU, which cannot hang but may be slow.
            memory: Bytes that may be taken of it; None for as much as there is.
            adapter: The former name of ``gpu``.

        Raises:
            DeviceError: If no such GPU can be opened.
        """
        if adapter is not None:
            warnings.warn("Device(adapter=) is now gpu=", DeprecationWarning, stacklevel=2)
            gpu = adapter
        self.in_turn = threading.RLock()
        self._process = os.getpid()
        _refuse_fork()
        chosen = choose_adapter(gpu, backend)
        self.backend = chosen.backend
        self.gpu = chosen.raw
        self.dispatches_per_submit = dispatches_per_submit
        self.pace = Pace.of_kind(self.gpu.info["adapter_type"], 1e-3 * submit_milliseconds)
        self.budget = memory
        self.timeout = timeout or (math.inf if self.is_cpu else _TIMEOUT)
        self.features = frozenset(self.backend.features_of(self.gpu))
        with self.driver_call("opening it"):
            self.raw = self.backend.request_device(self.gpu)
        _processes.add(self._process)
        weakref.finalize(self, self.backend.let_go, self.raw).atexit = False
        self.memory = MemoryCounter()
        self.params_at_once = self.is_cpu and not self.backend.proves_uniformity
        self._pipelines: dict[str, Any] = {}
        limits = self.raw.limits
        self.limits = Limits(
            int(limits["max-compute-invocations-per-workgroup"]),
            int(limits["max-compute-workgroup-storage-size"]),
        )
        self.notes: tuple[str, ...] = ()
        self._unsubmitted = self._under_way = 0  # bytes that the driver keeps in host memory
        self._broadcasting = 0  # the size of subgroups that broadcasts count on
        with self.memory.uncounted():
            self.profile = self._choose_profile()

    def driver_call(self, what: str) -> AbstractContextManager[None]:
        """What every call into the driver is made in that may wait for it or fail.

        Args:
            what: What is done, for messages: ``"reading a result"``.

        Raises:
            DeviceError: If this is a fork of the process that opened the device.
        """
        if os.getpid() != self._process:
            raise DeviceError(
                f"{self.name} was opened before this process was forked, where it does not work: "
                f"{_SPAWN}"
            )
        return driver_call(self.name, what, self.timeout)

    def submit(self, *commands: Any) -> None:
        """Hands finished command buffers to the driver; does not wait.

        Raises:
            DeviceError: If the driver refuses them, or the GPU was lost.
        """
        self._unsubmitted = 0
        with self.driver_call("submitting work"):
            self.raw.queue.submit(list(commands))

    @property
    def adapter(self) -> Any:
        """The former name of ``gpu``."""
        warnings.warn("Device.adapter is now Device.gpu", DeprecationWarning, stacklevel=2)
        return self.gpu

    @property
    def name(self) -> str:
        """The GPU's name."""
        return str(self.gpu.info["device"])

    @property
    def is_cpu(self) -> bool:
        """Whether this is a software GPU, which wants kernels without workgroup memory."""
        return bool(self.gpu.info["adapter_type"] == "CPU")

    def _choose_profile(self) -> Profile:
        if self.is_cpu:
            self._broadcasting = subgroup_size(self)
            return cpu_profile(self._broadcasting)
        units = matrix_units(self)
        if units.refusal:
            self.notes = (
                f"the matrix units of {self.name} are not used: {units.refusal}; products go "
                "through workgroup memory instead",
            )
        profile = gpu_profile(units.shape, self.limits)
        return replace(profile, gemm_kind="tiled") if units.refusal else profile

    @property
    def max_binding(self) -> int:
        """The largest number of bytes that one binding may show to a shader."""
        limits = self.raw.limits
        return int(min(limits["max-storage-buffer-binding-size"], limits["max-buffer-size"]))

    @property
    def max_buffer(self) -> int:
        """The largest number of bytes of a buffer, of which a binding may show a part."""
        return int(self.raw.limits["max-buffer-size"])

    def buffer(self, nbytes: int, kind: str, label: str = "", *, bound: bool = True) -> Any:
        """Allocates a zeroed storage buffer.

        Args:
            nbytes: Size of the buffer; rounded up to a multiple of four.
            kind: The kind that ``memory`` counts it under.
            label: For the driver's messages.
            bound: Whether it is bound as a whole; else smaller windows of it are.

        Raises:
            OutOfMemoryError: If it exceeds a limit of the GPU or the memory that is left.
        """
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
        """Allocates a storage texture of 16-byte texels, ``TEXTURE_WIDTH`` to a row.

        Args:
            nbytes: Size of the texture; rounded up to whole rows.
            kind: The kind that ``memory`` counts it under.
            label: For the driver's messages.

        Raises:
            OutOfMemoryError: If it exceeds a limit of the GPU or the memory that is left.
        """
        nbytes = texture_bytes(nbytes)
        usage = self.backend.module.TextureUsage
        flags = usage.STORAGE_BINDING | usage.COPY_DST | usage.COPY_SRC
        return self._allocate(
            lambda: self.raw.create_texture(
                size=(TEXTURE_WIDTH, nbytes // _TEXTURE_ROW, 1),
                format="rgba32uint",
                usage=flags,
                label=label,
            ),
            nbytes,
            _TEXTURE_ROW * int(self.raw.limits["max-texture-dimension-2d"]),
            kind,
            label,
        )

    def _allocate(
        self, make: Callable[[], Any], nbytes: int, most: int, kind: str, label: str
    ) -> Any:
        if nbytes > most:
            raise OutOfMemoryError(
                f"{label or kind} needs {nbytes:,} bytes in one piece, and {self.name} allows "
                f"{most:,}: lower the batch size or data.max_seq_length"
            )
        if self.budget is not None and self.memory.total + nbytes > self.budget:
            raise OutOfMemoryError(
                f"{label or kind} needs {nbytes:,} bytes more than the {self.memory.total:,} that "
                f"are taken, and device.memory allows {self.budget:,}: raise it, or lower the "
                "batch size or data.max_seq_length"
            )
        try:
            with self.driver_call(f"allocating {label or kind}"):
                memory = make()
        except OutOfMemoryError as err:
            raise OutOfMemoryError(
                f"{self.name} has no memory for {label or kind} ({nbytes:,} bytes, after "
                f"{self.memory.total:,}): lower the batch size or data.max_seq_length, or "
                "turn on train.gradient_checkpointing"
            ) from err
        self.memory.add(kind, nbytes, memory)
        return memory

    def write(
        self,
        buffer: Any,
        data: npt.NDArray[Any] | bytes,
        offset: int = 0,
        read: Callable[[npt.NDArray[Any]], None] = require_whole,
    ) -> None:
        """Copies host data into a buffer, in pieces so that host memory stays flat.

        A file's pages leave the process's memory behind each piece.

        Args:
            buffer: The buffer.
            data: What is copied.
            offset: The first byte of the buffer that it goes to.
            read: Called with each piece before it is copied, which may be a file's.

        Raises:
            WeightFileError: If the file that it is in was cut.
        """
        if isinstance(data, np.ndarray):
            raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        else:
            raw = np.frombuffer(data, np.uint8)
        if raw.size % 4:
            raw = np.pad(raw, (0, -raw.size % 4))
        for start in range(0, raw.size, UPLOAD_CHUNK):
            piece = raw[start : start + UPLOAD_CHUNK]
            read(piece)
            with self.driver_call("uploading data"):
                self.raw.queue.write_buffer(buffer, offset + start, piece)
            let_go(piece)
            self._unsubmitted += piece.size
            self._under_way += piece.size
            if self._unsubmitted >= UPLOAD_CHUNK:
                self.submit()

    def fill(self, buffer: Any, data: npt.NDArray[Any], offset: int = 0) -> None:
        """Writes what a new buffer, or a part of one, holds, and waits where much is on its way.

        The driver's copies would else lie between buffers that stay, and leave holes.
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
        """Fills a texture from its first texel on, in pieces so that host memory stays flat."""
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        rows = UPLOAD_CHUNK // _TEXTURE_ROW
        for row in range(0, -(-flat.size // _TEXTURE_ROW), rows):
            piece = flat[row * _TEXTURE_ROW : (row + rows) * _TEXTURE_ROW]
            height = -(-piece.size // _TEXTURE_ROW)
            require_whole(piece)
            with self.driver_call("uploading data"):
                self.raw.queue.write_texture(
                    {"texture": texture, "origin": (0, row, 0)},
                    np.pad(piece, (0, height * _TEXTURE_ROW - piece.size)),
                    {"bytes_per_row": _TEXTURE_ROW, "rows_per_image": height},
                    (TEXTURE_WIDTH, height, 1),
                )
            let_go(piece)
            self._under_way += piece.size
            self.submit()
            if self._under_way >= UPLOAD_CHUNK:
                self.read_texture(texture, 4)

    def read_texture(self, texture: Any, nbytes: int, offset: int = 0) -> memoryview:
        """Waits for all submitted work and copies a texture's bytes back."""
        first, last = offset // _TEXTURE_ROW, -(-(offset + nbytes) // _TEXTURE_ROW)
        with self.driver_call("reading a result"):
            data: memoryview = self.raw.queue.read_texture(
                {"texture": texture, "origin": (0, first, 0)},
                {"bytes_per_row": _TEXTURE_ROW, "rows_per_image": last - first},
                (TEXTURE_WIDTH, last - first, 1),
            )
        self._under_way = 0
        start = offset - first * _TEXTURE_ROW
        return data.cast("B")[start : start + nbytes]

    def pipeline(self, shader: Shader) -> Any:
        """Compiles a shader, once."""
        pipeline = self._pipelines.get(shader.label)
        if pipeline is None:
            with self.driver_call(f"compiling {shader.label}"):
                pipeline = self._compile(shader)
            self._pipelines[shader.label] = pipeline
        return pipeline

    def _compile(self, shader: Shader) -> Any:
        code = read_at_once(shader.code) if self.params_at_once else shader.code
        code = self.backend.dialect(code, self._pinned_size(shader))
        module = self.backend.compile(self.raw, code, shader.label)
        return self.raw.create_compute_pipeline(
            layout="auto", compute={"module": module, "entry_point": "main"}
        )

    def _pinned_size(self, shader: Shader) -> int:
        """The subgroup size to be asked for, if this GPU can be asked; 0 leaves it open."""
        if "subgroup-size-control" not in self.features:
            return 0
        return shader.subgroup_size or self._broadcasting

    def dispatch(self, pipeline: Any, group: Any, workgroups: tuple[int, int, int]) -> None:
        """Runs one kernel, in a submit of its own."""
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


def buffer_bytes(nbytes: int) -> int:
    """Bytes that a buffer of this size takes on the device."""
    return max(nbytes + -nbytes % 4, 16)


def texture_bytes(nbytes: int) -> int:
    """Bytes that a texture of this size takes on the device: whole rows of texels.

    lavapipe compiles a shader anew for each of its textures whose height is a power of two or is
    not, as chance has it: none is, but for those near a device's limit.
    """
    rows = max(-(-nbytes // _TEXTURE_ROW), 3)
    is_power = rows & (rows - 1) == 0
    return (rows + (is_power and rows < _FREE_ROWS)) * _TEXTURE_ROW
