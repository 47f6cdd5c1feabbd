"""How cost grows with sequence, batch, rank and layers, one at a time.

usage: python benchmarks/sweep.py [--steps N] [--only AXIS ...] [--json FILE]

The middle of the sweep is shape S at 512 tokens, batch 1, r 8. Per point: seconds of a step (the
best, and the median), tokens per second, operations per second and planned memory; and, between
neighbouring points, by which power of the size the time and the activations grow.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

from qlora_wgpu.bench.timing import time_steps, total_steps
from qlora_wgpu.bench.workload import Workload, config_of, find_shape
from qlora_wgpu.config import OptimConfig, QuantConfig
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.training.optimizer import Optimizer

MIDDLE = {"seq": 512, "batch": 1, "rank": 8, "layers": 4}
AXES = {
    "seq": [128, 256, 512, 1024, 2048],
    "batch": [1, 2, 4, 8],
    "rank": [4, 8, 16, 32, 64],
    "layers": [2, 4, 8, 16],
}


def point(sizes: dict[str, int], steps: int) -> dict[str, Any]:
    """One measurement, on a device of its own so that nothing is left from the last."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(
            json.dumps(config_of("S") | {"num_hidden_layers": sizes["layers"]}), encoding="utf-8"
        )
        shape = find_shape(str(path))
        workload = Workload(shape, sizes["batch"], sizes["seq"], sizes["rank"], steps=steps)
        device = Device()
        planned = workload.planned_memory(device)
        model = QLoRAModel.from_folder(
            shape.folder, workload.lora, QuantConfig(), "bfloat16", device, name_or_path="S"
        )
        optimizer = Optimizer(model, OptimConfig(), total_steps(steps))
        times = time_steps(model, optimizer, workload.batch, workload.seq, steps).step_seconds
        flops = model.program("train", workload.batch, workload.seq).plan.flops
        return {
            **sizes,
            "step_ms": round(1e3 * times.least, 2),
            "median_step_ms": round(1e3 * times.median, 2),
            "tokens_per_second": round(workload.batch * workload.seq / times.least),
            "gflops": round(flops / times.least / 1e9, 1),
            "planned_mib": round(sum(planned.values()) / 2**20, 2),
            "activations_mib": round(planned["activations"] / 2**20, 2),
            "observed_mib": round(device.memory.peak / 2**20, 2),
            "device": device.name,
            "driver": device.gpu.info["description"],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", nargs="*", choices=list(AXES), default=list(AXES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = {}
    for axis in args.only:
        rows = results[axis] = [point(MIDDLE | {axis: size}, args.steps) for size in AXES[axis]]
        before = None
        for row in rows:
            if before is not None:
                step = math.log2(row[axis] / before[axis])
                for key in ("step_ms", "activations_mib"):
                    row[f"{key}_power"] = round(math.log2(row[key] / before[key]) / step, 2)
            before = row
            print(axis, json.dumps({k: v for k, v in row.items() if k not in ("device", "driver")}))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
