"""Times training steps of random models: tokens per second, the host's share, device memory.

usage: python benchmarks/step.py [shape ...] [--seq N] [--batch N] [--steps N] [--checkpointing]
       [--json FILE]

A step is one micro-batch and one update, r 8 on seven projections, NF4, bfloat16 operands. The
host's share is the time that packing and encoding take over the time of the whole step; submits
are left out, since a software GPU computes inside them.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from shapes import SHAPES, write_random_model

from qlora_wgpu import LoraConfig, QLoRAModel
from qlora_wgpu.bench.timing import time_steps, total_steps
from qlora_wgpu.config import OptimConfig
from qlora_wgpu.model.memory_plan import plan_training_memory
from qlora_wgpu.training.optimizer import Optimizer


def measure(shape: str, seq: int, batch: int, steps: int, checkpointing: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = write_random_model(Path(folder), shape)
        begin = time.perf_counter()
        lora = LoraConfig(r=8, lora_alpha=16)
        model = QLoRAModel.from_pretrained(path, lora=lora, gradient_checkpointing=checkpointing)
        loaded = time.perf_counter() - begin
        planned = plan_training_memory(
            model.folder.config, lora, model.quant, model.compute_dtype, batch_size=batch, seq=seq,
            gradient_checkpointing=checkpointing, max_binding=model.device.max_binding,
            profile=model.device.profile,
        )  # fmt: skip
        optimizer = Optimizer(model, OptimConfig(), total_steps(steps))
        begin = time.perf_counter()
        model.prepare(batch, seq)
        prepared = time.perf_counter() - begin
        times = time_steps(model, optimizer, batch, seq, steps)
        spread = times.step_seconds
        flops = model.program("train", batch, seq).plan.flops
        median = spread.median
        return {
            "shape": shape,
            "device": model.device.name,
            "driver": model.device.gpu.info["description"],
            "seq": seq,
            "batch": batch,
            "gradient_checkpointing": checkpointing,
            "tokens_per_second": round(batch * seq / median, 1),
            "spread": [round(batch * seq / spread.most, 1), round(batch * seq / spread.least, 1)],
            "gflops": round(flops / median / 1e9, 1),
            "host_share": round(times.host_share, 4),
            "load_seconds": round(loaded, 2),
            "first_step_seconds": round(prepared + times.first_step_seconds, 2),
            "planned_mib": round(sum(planned.values()) / 2**20, 2),
            "observed_mib": round(model.device.memory.peak / 2**20, 2),
            "activations_mib": round(model.device.memory.by_kind["activations"] / 2**20, 2),
            "process_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10),
            "loss": round(times.loss, 4),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="*", default=["S", "M"], choices=[*SHAPES, []])
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = []
    for shape in args.shapes:
        result = measure(shape, args.seq, args.batch, args.steps, args.checkpointing)
        results.append(result)
        print(json.dumps(result), flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
