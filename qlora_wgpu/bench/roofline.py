"""A GPU's measured peak throughput and bandwidth, and the overhead of launches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qlora_wgpu.bench.timing import DispatchTimer, Load, clock_of, has_timestamps
from qlora_wgpu.errors import DeviceError, OutOfMemoryError
from qlora_wgpu.gpu.backend import Dispatch
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.operands import Bound
from qlora_wgpu.gpu.wgsl import Constants, Shader, fold_workgroups, load_shader
from qlora_wgpu.graph.tensor import ceil_div

_KIND = "ceilings"  # of the buffers, in the memory statistics
_FMA_GROUPS, _FMA_GROUP = 8192, 32
_FMA_PER_TURN = 8 * 24  # of an invocation, as shaders/bench/fma.wgsl is unrolled
_MATRIX_GROUPS = {True: 64, False: 4096}  # by Device.is_cpu
_MATRIX_SUBGROUPS, _MATRICES_PER_TURN = 4, 8  # of a workgroup and subgroup in bench/matrix.wgsl
_MAX_TURNS = 32_768  # software GPUs abort loops after twice as many
_COPY_BYTES = {True: 64 << 20, False: 256 << 20}  # larger than caches; by Device.is_cpu
_ENOUGH_SECONDS = 0.02
_ROUNDS = 5


@dataclass(frozen=True)
class Ceilings:
    """The measured peak rates of a GPU."""

    flops_per_second: float  # of float32 multiply-adds, two operations each
    bytes_per_second: float  # read plus written by a copy kernel, in the faster kind of memory
    # Of matrix units with operands in registers; 0 if kernels use none
    matrix_flops_per_second: float = 0.0

    def higher(self, other: Ceilings) -> Ceilings:
        """The higher of two measurements of each rate."""
        return Ceilings(
            max(self.flops_per_second, other.flops_per_second),
            max(self.bytes_per_second, other.bytes_per_second),
            max(self.matrix_flops_per_second, other.matrix_flops_per_second),
        )


def measure_ceilings(device: Device) -> Ceilings:
    """Measures all ceilings, in about a second."""
    with device.memory.uncounted():
        copies = [_copy_rate(device, texture=False)]
        if device.profile.textures:
            copies.append(_copy_rate(device, texture=True))
        return Ceilings(_fma_rate(device), max(copies), _matrix_rate(device))


def _fma_rate(device: Device) -> float:
    # x becomes x / 2 + 1, which stays a normal number.
    shader = load_shader("bench/fma.wgsl")
    turns = _turns_per_second(device, shader, _FMA_GROUPS, factor=0.5, summand=1.0)
    return 2.0 * _FMA_PER_TURN * _FMA_GROUPS * _FMA_GROUP * turns


def _matrix_rate(device: Device) -> float:
    """The rate of the matrix units; 0 if there are none, or if they fail."""
    if device.profile.gemm_kind != "matrix":
        return 0.0
    m, n, k, threads = device.profile.matrix
    constants: Constants = (
        ("GROUP", _MATRIX_SUBGROUPS * threads),
        ("HALF", device.profile.matrix_element == "f16"),
        ("K", k),
        ("M", m),
        ("N", n),
        ("SUBGROUPS", _MATRIX_SUBGROUPS),
        ("SUBGROUP_SIZE", threads),
    )
    groups = _MATRIX_GROUPS[device.is_cpu]
    try:
        turns = _turns_per_second(device, load_shader("bench/matrix.wgsl", constants), groups)
    except OutOfMemoryError:
        raise
    except DeviceError:
        return 0.0
    return 2.0 * m * n * k * _MATRICES_PER_TURN * _MATRIX_SUBGROUPS * groups * turns


def _turns_per_second(device: Device, shader: Shader, groups: int, **values: float) -> float:
    """How often per second all invocations of a shader repeat their loop."""
    nbytes = 4 * groups * math.prod(shader.workgroup_size)
    sums, params = device.buffer(nbytes, _KIND), device.buffer(16, _KIND)
    windows = {"params": (params, 0, 16), "sums": (sums, 0, nbytes)}
    dispatch = device.pipeline(shader), device.bind_group(shader, windows), (groups, 1, 1)
    clock = clock_of(device, sums)
    turns = 4
    while True:
        device.write(params, shader.pack_params({"turns": turns, **values}))
        seconds = clock(dispatch)
        if seconds >= _ENOUGH_SECONDS or turns == _MAX_TURNS:
            break
        turns = min(4 * turns, _MAX_TURNS)
    seconds = min(seconds, _best(clock, dispatch))
    _destroy(sums, params)
    return turns / max(seconds, 1e-9)


def _copy_rate(device: Device, *, texture: bool) -> float:
    nbytes = min(_COPY_BYTES[device.is_cpu], device.max_binding)
    flat, elements = device.profile.flat_group, device.profile.elements_per_thread
    constants: Constants = (("ELEMENTS", elements), ("FLAT", flat))
    memory = Bound("float32", texture)
    shader = load_shader("tensor/copy.wgsl", constants, (("x", memory), ("y", memory)))
    make = device.texture if texture else device.buffer
    x, y = make(nbytes, _KIND, "a copy's source"), make(nbytes, _KIND, "a copy's target")
    params = device.buffer(16, _KIND)
    begin = {"first_texel_x": 0} if texture else {}
    device.write(params, shader.pack_params({"units": nbytes // 16, **begin}))
    windows = {"params": (params, 0, 16), "x": (x, 0, nbytes), "y": (y, 0, nbytes)}
    groups = fold_workgroups(ceil_div(nbytes // 16, flat * elements))
    dispatch = device.pipeline(shader), device.bind_group(shader, windows), groups
    clock = clock_of(device, params)
    clock(dispatch)  # the first one touches the pages
    seconds = _best(clock, dispatch)
    _destroy(x, y, params)
    return 2.0 * nbytes / seconds


def _best(clock: Callable[[Dispatch], float], dispatch: Dispatch) -> float:
    return max(1e-9, min(clock(dispatch) for _ in range(_ROUNDS)))


def _destroy(*resources: Any) -> None:
    for resource in resources:
        resource.destroy()


_GAPS = "gaps"
_DISPATCHES, _SUBMITS = 1000, 20


@dataclass(frozen=True)
class Gaps:
    """Overheads in seconds, the minimum of several rounds."""

    dispatch: float  # of a dispatch that depends on the one before, within a pass
    submit: float  # of a submit, with its encoding
    timed: float  # of an almost empty dispatch, by timestamps; 0 without them


def measure_gaps(device: Device) -> Gaps:
    """Measures all overheads, in about a second."""
    load = Load(device)
    load.raise_clock()
    with device.memory.uncounted():
        target, params = device.buffer(16, _GAPS), device.buffer(16, _GAPS)
        dispatch = _writes_one_word(device, target, params)

        def seconds(submits: int, dispatches: int) -> float:
            device.read(target, 4)
            load.run()
            begin = time.perf_counter()
            for _ in range(submits):
                _submit(device, [dispatch] * dispatches)
            device.read(target, 4)
            return time.perf_counter() - begin

        few = min(seconds(1, 1) for _ in range(_ROUNDS))
        many = min(seconds(1, 1 + _DISPATCHES) for _ in range(_ROUNDS))
        submits = min(seconds(1 + _SUBMITS, 1) for _ in range(_ROUNDS))
        timed = 0.0
        if has_timestamps(device):
            several = [dispatch] * (4 * _ROUNDS)
            timed = min(DispatchTimer(device).seconds(several, [0.0] * len(several)))
        target.destroy()
        params.destroy()
    return Gaps(
        dispatch=max(many - few, 0.0) / _DISPATCHES,
        submit=max(submits - few, 0.0) / _SUBMITS,
        timed=timed,
    )


def _writes_one_word(device: Device, target: object, params: object) -> Dispatch:
    flat, elements = device.profile.flat_group, device.profile.elements_per_thread
    constants: Constants = (("ELEMENTS", elements), ("FLAT", flat))
    shader = load_shader("tensor/fill.wgsl", constants, (("y", Bound("float32")),))
    device.write(params, shader.pack_params({"units": 1}))
    group = device.bind_group(shader, {"params": (params, 0, 16), "y": (target, 0, 16)})
    return device.pipeline(shader), group, (1, 1, 1)


def _submit(device: Device, dispatches: list[Dispatch]) -> None:
    encoder = device.raw.create_command_encoder()
    compute = encoder.begin_compute_pass()
    device.backend.record(compute, dispatches)
    compute.end()
    device.submit(encoder.finish())
