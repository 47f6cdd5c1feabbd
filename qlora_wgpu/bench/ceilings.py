"""What a GPU gives at most: multiply-adds in registers, and bytes moved by a plain copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qlora_wgpu.bench.timing import clock_of
from qlora_wgpu.gpu.backend import Dispatch
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.grid import fold_workgroups
from qlora_wgpu.gpu.operands import Bound
from qlora_wgpu.gpu.wgsl import Constants, load_shader
from qlora_wgpu.graph.dtype import ceil_div

_KIND = "ceilings"  # what their buffers are counted as
_FMA_GROUPS, _FMA_GROUP = 8192, 32
_FMA_PER_TURN = 8 * 24  # of an invocation, as shaders/bench/fma.wgsl is unrolled
_MOST_TURNS = 32_768  # software GPUs end loops after twice as many
_COPY_BYTES = {True: 64 << 20, False: 256 << 20}  # past the caches; by Device.is_cpu
_ENOUGH_SECONDS = 0.02
_ROUNDS = 5


@dataclass(frozen=True)
class Ceilings:
    """The measured ceilings of one GPU.

    Attributes:
        flops_per_second: Rate of a loop of float32 multiply-adds, two operations each.
        bytes_per_second: Bytes read plus written by a copy kernel, in the faster kind of memory.
    """

    flops_per_second: float
    bytes_per_second: float

    def higher(self, other: Ceilings) -> Ceilings:
        """The higher of two measurements in each."""
        return Ceilings(
            max(self.flops_per_second, other.flops_per_second),
            max(self.bytes_per_second, other.bytes_per_second),
        )


def measure_ceilings(device: Device) -> Ceilings:
    """Measures both, in about a second.

    Raises:
        OutOfMemoryError: If the device has no room for the copy's buffers.
    """
    with device.memory.uncounted():
        copies = [_copy_rate(device, texture=False)]
        if device.profile.textures:
            copies.append(_copy_rate(device, texture=True))
        return Ceilings(_fma_rate(device), max(copies))


def _fma_rate(device: Device) -> float:
    shader = load_shader("bench/fma.wgsl")
    invocations = _FMA_GROUPS * _FMA_GROUP
    sums, params = device.buffer(4 * invocations, _KIND), device.buffer(16, _KIND)
    windows = {"params": (params, 0, 16), "sums": (sums, 0, 4 * invocations)}
    group = device.bind_group(shader, windows)
    dispatch = device.pipeline(shader), group, (_FMA_GROUPS, 1, 1)
    clock = clock_of(device, sums)
    turns, seconds = 4, 0.0
    while True:
        # x becomes x / 2 + 1, so that it stays a normal number for ever.
        values = {"turns": turns, "factor": 0.5, "summand": 1.0}
        device.write(params, shader.pack_params(values))
        seconds = clock(dispatch)
        if seconds >= _ENOUGH_SECONDS or turns == _MOST_TURNS:
            break
        turns = min(4 * turns, _MOST_TURNS)
    seconds = min(seconds, _best(clock, dispatch))
    _destroy(sums, params)
    return 2.0 * _FMA_PER_TURN * turns * invocations / seconds


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
    clock(dispatch)  # the first touches the pages
    seconds = _best(clock, dispatch)
    _destroy(x, y, params)
    return 2.0 * nbytes / seconds


def _best(clock: Callable[[Dispatch], float], dispatch: Dispatch) -> float:
    return max(1e-9, min(clock(dispatch) for _ in range(_ROUNDS)))


def _destroy(*resources: Any) -> None:
    for resource in resources:
        resource.destroy()
