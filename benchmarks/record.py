"""Dispatches a second that the host encodes: a plan's recording against wgpu-py's own calls.

usage: python benchmarks/record.py [--backend NAME] [--dispatches N] [--rounds N]

Nothing is submitted; the best of the rounds counts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

from qlora_wgpu.gpu.backend import Backend, Dispatch
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.operands import Bound
from qlora_wgpu.gpu.wgsl import load_shader


def per_second(
    device: Device,
    record: Callable[[Any, list[Dispatch]], None],
    dispatches: list[Dispatch],
    n: int,
) -> float:
    best = float("inf")
    for _ in range(n):
        encoder = device.raw.create_command_encoder()
        compute = encoder.begin_compute_pass()
        begin = time.perf_counter()
        record(compute, dispatches)
        best = min(best, time.perf_counter() - begin)
        compute.end()
        encoder.finish()
    return len(dispatches) / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--dispatches", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    device = Device(backend=args.backend)
    constants = {"FLAT": device.profile.flat_group, "ELEMENTS": device.profile.elements_per_thread}
    bound = (("y", Bound("float32")),)
    shader = load_shader("tensor/fill.wgsl", tuple(sorted(constants.items())), bound)
    params, y = device.buffer(16, "record"), device.buffer(1 << 16, "record")
    windows = {"params": (params, 0, 16), "y": (y, 0, 1 << 16)}
    groups = [device.bind_group(shader, windows) for _ in range(8)]
    pipeline = device.pipeline(shader)
    dispatches = [(pipeline, groups[i % 8], (1, 1, 1)) for i in range(args.dispatches)]
    plain = per_second(
        device, lambda c, d: Backend.record(device.backend, c, d), dispatches, args.rounds
    )
    own = per_second(device, device.backend.record, dispatches, args.rounds)
    shown = {"device": device.name, "backend": device.backend.name}
    print(json.dumps({**shown, "plain_per_s": round(plain), "per_s": round(own)}))


if __name__ == "__main__":
    main()
