"""What launches cost besides their work: between dependent dispatches, of a pass, of a submit."""

from __future__ import annotations

import time
from dataclasses import dataclass

from qlora_wgpu.bench.load import Load
from qlora_wgpu.bench.timing import DispatchTimer, has_timestamps
from qlora_wgpu.gpu.backend import Dispatch
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.operands import Bound
from qlora_wgpu.gpu.wgsl import Constants, load_shader

_KIND = "gaps"
_DISPATCHES, _SUBMITS = 1000, 20
_ROUNDS = 5


@dataclass(frozen=True)
class Gaps:
    """Seconds without work, the least of some rounds.

    Attributes:
        dispatch: From one dispatch to the next that needs its result, within a pass.
        submit: Of a submit more, its encoding included.
        timed: What timestamps show of a dispatch that does next to nothing; 0 without timestamps.
    """

    dispatch: float
    submit: float
    timed: float


def measure_gaps(device: Device) -> Gaps:
    """Measures all, in about a second."""
    load = Load(device)
    load.raise_clock()
    with device.memory.uncounted():
        target, params = device.buffer(16, _KIND), device.buffer(16, _KIND)
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
