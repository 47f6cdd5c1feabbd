"""Times training steps of random models: tokens per second, the host's share, device memory.

usage: python benchmarks/step.py [shape ...] [--seq N] [--batch N] [--steps N] [--checkpointing]
       [--json FILE]

A step is one micro-batch and one update, r 8 on seven projections, NF4, bfloat16 operands. The
host's share is the time that packing and encoding take over the time of the whole step; submits
are left out, since a software adapter computes inside them.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from shapes import SHAPES, write_random_model

from qlora_wgpu import LoraConfig, QLoRAModel
from qlora_wgpu.config import OptimConfig
from qlora_wgpu.models.memory import plan_training_memory
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
        ids = np.random.default_rng(1).integers(0, SHAPES[shape]["vocab_size"], (batch, seq))
        checked = model.checked(ids, ids)
        optimizer = Optimizer(model, OptimConfig(), steps + 2)
        model.zero_gradient()
        submitting = clock_submits(model)
        begin = time.perf_counter()
        whole, host = [], []
        for step in range(1, steps + 3):
            submitting[0] = 0.0
            t0 = time.perf_counter()
            model.accumulate(*checked)
            optimizer.step(step)
            t1 = time.perf_counter() - submitting[0]
            loss = float(model.read_stats()[0]) / (batch * (seq - 1))
            t2 = time.perf_counter()
            model.zero_stats()
            if step == 1:
                first = t2 - begin
            if step > 2:
                whole.append(t2 - t0)
                host.append(t1 - t0)
        flops = model.program("train", batch, seq).plan.flops
        median = statistics.median(whole)
        return {
            "shape": shape,
            "device": model.device.name,
            "driver": model.device.adapter.info["description"],
            "seq": seq,
            "batch": batch,
            "gradient_checkpointing": checkpointing,
            "tokens_per_second": round(batch * seq / median, 1),
            "spread": [round(batch * seq / max(whole), 1), round(batch * seq / min(whole), 1)],
            "gflops": round(flops / median / 1e9, 1),
            "host_share": round(statistics.median(host) / median, 4),
            "load_seconds": round(loaded, 2),
            "first_step_seconds": round(first, 2),
            "planned_mib": round(sum(planned.values()) / 2**20, 2),
            "observed_mib": round(model.device.memory.peak / 2**20, 2),
            "activations_mib": round(model.device.memory.by_kind["activations"] / 2**20, 2),
            "process_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10),
            "loss": round(loss, 4),
        }


def clock_submits(model: QLoRAModel) -> list[float]:
    """Seconds spent in submits since the one element was last set to zero."""
    queue, spent = model.device.raw.queue, [0.0]
    original = queue.submit

    def submit(buffers: Any) -> None:
        begin = time.perf_counter()
        original(buffers)
        spent[0] += time.perf_counter() - begin

    queue.submit = submit
    return spent


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
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
