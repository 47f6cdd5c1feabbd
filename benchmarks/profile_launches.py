"""Times every kind of launch of a training step with timestamp queries.

usage: python benchmarks/profile_launches.py SHAPE [--seq N] [--batch N]
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
from shapes import SHAPES, write_random_model

from qlora_wgpu import LoraConfig, QLoRAModel
from qlora_wgpu.gpu.backend import webgpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5, help="the best of so many counts")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = write_random_model(Path(folder), args.shape)
        model = QLoRAModel.from_pretrained(path, lora=LoraConfig(r=8, lora_alpha=16))
        ids = np.random.default_rng(1).integers(
            0, SHAPES[args.shape]["vocab_size"], (args.batch, args.seq)
        )
        model.zero_gradient()
        model.accumulate(*model.checked(ids, ids))
        model.read_stats()
        seconds, flops, count = timings(model, args.batch, args.seq, args.rounds)
    total = sum(seconds.values())
    print(f"{model.device.name}: {args.shape}, batch {args.batch}, seq {args.seq}")
    for label, took in seconds.most_common():
        rate = flops[label] / took / 1e9 if took else 0.0
        print(f"{label:28} {count[label]:5} x {1e3 * took:10.2f} ms {took / total:7.1%} "
              f"{rate:9.1f} GFLOP/s")  # fmt: skip
    print(f"{'all':28} {sum(count.values()):5} x {1e3 * total:10.2f} ms")


def timings(
    model: QLoRAModel, batch: int, seq: int, rounds: int
) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Seconds, floating-point operations and launches by label, each launch timed alone."""
    wgpu, raw = webgpu(), model.device.raw
    program = model.program("train", batch, seq)
    dispatches = program.dispatches
    queries = raw.create_query_set(type="timestamp", count=2)
    usage = wgpu.BufferUsage.QUERY_RESOLVE | wgpu.BufferUsage.COPY_SRC
    resolved = raw.create_buffer(size=256, usage=usage)
    period = timestamp_period(raw)
    best = [float("inf")] * len(dispatches)
    for _ in range(rounds):
        for index, (pipeline, group, workgroups) in enumerate(dispatches):
            encoder = raw.create_command_encoder()
            writes = {
                "query_set": queries,
                "beginning_of_pass_write_index": 0,
                "end_of_pass_write_index": 1,
            }
            compute = encoder.begin_compute_pass(timestamp_writes=writes)
            compute.set_pipeline(pipeline)
            compute.set_bind_group(0, group)
            compute.dispatch_workgroups(*workgroups)
            compute.end()
            encoder.resolve_query_set(queries, 0, 2, resolved, 0)
            raw.queue.submit([encoder.finish()])
            begin, end = np.frombuffer(raw.queue.read_buffer(resolved, 0, 16), np.uint64)
            best[index] = min(best[index], float(end - begin) * period * 1e-9)
    seconds: Counter[str] = Counter()
    flops: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for launch, took in zip(program.plan.launches, best, strict=True):
        seconds[launch.label] += took
        flops[launch.label] += launch.flops
        count[launch.label] += 1
    return seconds, flops, count


def timestamp_period(raw: object) -> float:
    """Nanoseconds of a timestamp's tick; 1 where the library does not tell."""
    try:
        from wgpu.backends.wgpu_native import lib

        return float(lib.wgpuQueueGetTimestampPeriod(raw.queue._internal))  # type: ignore[attr-defined]
    except Exception:
        return 1.0


if __name__ == "__main__":
    main()
