"""What a GPU is and gives at most: features, subgroups, matrix units, ceilings, gaps.

usage: python benchmarks/gpu_probe.py OUT [--backend NAME] [--only device|ceilings]

OUT.jsonl gets a row each; the package's own start (its self-tests) is timed, too.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from gpu_rows import Rows

from qlora_wgpu.bench.roofline import measure_ceilings, measure_gaps
from qlora_wgpu.gpu.device import Device

_INVOCATIONS = 128
_SUBGROUPS = f"""
@group(0) @binding(0) var<storage, read_write> seen: array<u32>;
@compute @workgroup_size({_INVOCATIONS})
fn main(@builtin(local_invocation_index) i: u32, @builtin(subgroup_size) size: u32) {{
    seen[i] = size;
}}
"""


def about(device: Device) -> dict[str, Any]:
    info = {name: str(value) for name, value in device.gpu.info.items()}
    return {
        "name": device.name,
        "backend": device.backend.name,
        "info": info,
        "features": sorted(device.features),
        "all_features": sorted(map(str, device.gpu.features)),
        "limits": {name: int(value) for name, value in sorted(device.raw.limits.items())},
        "profile": asdict(device.profile),
        "matrix_shapes": [str(shape) for shape in device.backend.matrix_shapes(device.gpu)],
        "matrix_shape_chosen": device.profile.matrix,
        "notes": device.notes,
    }


def listed_matrices(device: Device) -> dict[str, Any]:
    """All that Dawn says of an adapter, matrix units of any types among it."""
    if device.backend.name != "dawn":
        return {"properties": None}
    from wgpudawn.backends.dawn import extras

    return {"properties": repr(extras.get_adapter_properties(device.gpu))}


def subgroups(device: Device) -> dict[str, Any]:
    """Sizes that invocations of a plain kernel see, and how many see each."""
    buffer = device.buffer(4 * _INVOCATIONS, "probe")
    module = device.raw.create_shader_module(code=device.backend.dialect(_SUBGROUPS))
    pipeline = device.raw.create_compute_pipeline(
        layout="auto", compute={"module": module, "entry_point": "main"}
    )
    entry = {"binding": 0, "resource": {"buffer": buffer, "offset": 0, "size": 4 * _INVOCATIONS}}
    group = device.raw.create_bind_group(layout=pipeline.get_bind_group_layout(0), entries=[entry])
    device.dispatch(pipeline, group, (1, 1, 1))
    sizes = np.frombuffer(device.read(buffer, 4 * _INVOCATIONS), np.uint32)
    return {"sizes": {str(size): count for size, count in Counter(sizes.tolist()).items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--only", choices=["device", "ceilings"])
    args = parser.parse_args()
    begin = time.perf_counter()
    device = Device(backend=args.backend)
    opened = time.perf_counter() - begin
    rows = Rows(Path(f"{args.out}.jsonl"))
    if args.only != "ceilings":
        rows.measure("about", lambda: {**about(device), "open_seconds": opened})
        rows.measure("listed matrices", lambda: listed_matrices(device))
        rows.measure("subgroups", lambda: subgroups(device))
    if args.only != "device":
        rows.measure("gaps", lambda: asdict(measure_gaps(device)))
        for attempt in ("first", "second"):
            rows.measure(f"ceilings, {attempt}", lambda: asdict(measure_ceilings(device)))


if __name__ == "__main__":
    main()
