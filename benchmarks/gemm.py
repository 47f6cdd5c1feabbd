"""GFLOP/s of the base products, variant by variant, against the GPU's float32 ceiling.

usage: python benchmarks/gemm.py [--backend NAME] [--size ROWSxINxOUT ...] [--rounds N]
           [--json FILE]

A size is of y = x·Wᵀ (nt) and of dx = dy·W (nn), operands bfloat16. Variants are the GPU's
default and the tuner's candidates for it. The best of the rounds counts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from qlora_wgpu.bench.roofline import measure_ceilings
from qlora_wgpu.bench.timing import DispatchTimer, Load, best_of, clock_of, has_timestamps
from qlora_wgpu.bfloat16 import to_bfloat16
from qlora_wgpu.errors import QLoRAError
from qlora_wgpu.gpu.backend import Dispatch
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.kernel_config import Profile
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.plan import compile_plan
from qlora_wgpu.graph.program import BufferPool, Program
from qlora_wgpu.graph.tensor import Storage, Tensor, matrix, pad_rows
from qlora_wgpu.kernels.gemm import GEMM, Gemm
from qlora_wgpu.tuning.tuner import bases, candidates, tunables_of

SIZES = ("1024x2048x2048", "2048x2048x8192", "2048x4096x14336")


class HostTimer:
    """The host's clock, as ``best_of`` asks for it, where the GPU has none."""

    def __init__(self, device: Device) -> None:
        self.load = Load(device)
        self.rough_seconds = clock_of(device, device.buffer(16, "timing"))

    def seconds(self, dispatches: Sequence[Dispatch], expected: Sequence[float]) -> list[float]:
        return list(map(self.rough_seconds, dispatches))


def operand(device: Device, rng: Any, rows: int, columns: int) -> Tensor:
    data = to_bfloat16(pad_rows(rng.standard_normal((rows, columns), dtype=np.float32)))
    storage = Storage("operand", "timing", data.nbytes, data, device.profile.textures)
    return matrix("operand", rows, columns, "bfloat16", storage)


def variants(device: Device) -> list[tuple[str, Profile]]:
    """The default first, then what differs from it in the products alone."""
    default = device.profile
    products = next(t for t in tunables_of(default) if t.name == "products")
    names = sorted({name for change in products.changes(default) for name in change})
    profiles: dict[tuple[Any, ...], tuple[str, Profile]] = {}
    for profile in (default, *candidates(default), *bases(default)[1:]):
        key = tuple(getattr(profile, name) for name in (*names, "subgroup_size"))
        values = ", ".join(f"{n} {getattr(profile, n)}" for n in names)
        profiles.setdefault(key, ("default: " + values if profile is default else values, profile))
    return list(profiles.values())


def time_size(device: Device, size: str, rounds: int) -> list[dict[str, Any]]:
    rows, inner, outer = map(int, size.split("x"))
    rng = np.random.default_rng(0)
    results = []
    x, dy = operand(device, rng, rows, inner), operand(device, rng, rows, outer)
    w = operand(device, rng, outer, inner)
    timer = DispatchTimer(device) if has_timestamps(device) else HostTimer(device)
    for name, profile in variants(device):
        if profile.textures != device.profile.textures:
            continue  # its operands are of the other kind of memory
        device.profile = profile
        graph = Graph("bfloat16", profile, device.max_binding)
        y = graph.operand("y", rows, outer)
        dx = graph.float32("dx", rows, inner)
        GEMM.launch(graph, Gemm(x, w, y, True, label="nt"))
        GEMM.launch(graph, Gemm(dy, w, dx, False, label="nn"))
        row: dict[str, Any] = {"size": size, "variant": name}
        try:
            program = Program(device, compile_plan(graph, (y, dx)), BufferPool(device))
            seconds = best_of(program.pieces, timer, rounds)
        except QLoRAError as err:
            results.append({**row, "failed": str(err)})
            continue
        flops = 2 * rows * inner * outer
        spent = {"nt": 0.0, "nn": 0.0}  # a product in parts is two launches
        for launch, time in zip(program.plan.launches, seconds, strict=True):
            spent["nt" if launch.label == "nt" else "nn"] += time
        row |= {f"{k}_gflops": round(flops / max(v, 1e-9) / 1e9, 1) for k, v in spent.items()}
        results.append(row)
        print(json.dumps(row), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--size", nargs="*", default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = Device(backend=args.backend)
    default = device.profile
    rows = []
    for size in args.size:
        device.profile = default
        rows += time_size(device, size, args.rounds)
    device.profile = default
    report = {
        "device": device.name,
        "driver": device.gpu.info["description"],
        "backend": device.backend.name,
        "features": sorted(device.features),
        "limits": {name: int(value) for name, value in sorted(device.raw.limits.items())},
        "profile": {field.name: getattr(default, field.name) for field in fields(default)},
        "float32_ceiling_gflops": round(measure_ceilings(device).flops_per_second / 1e9, 1),
        "products": rows,
    }
    print(json.dumps({k: report[k] for k in ("device", "backend", "float32_ceiling_gflops")}))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
