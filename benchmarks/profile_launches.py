"""Times every kind of launch of a training step with timestamp queries.

usage: python benchmarks/profile_launches.py SHAPE [--seq N] [--batch N]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
from shapes import SHAPES, write_random_model

from qlora_wgpu import LoraConfig, QLoRAModel
from qlora_wgpu.bench.measure import sum_up
from qlora_wgpu.bench.timing import DispatchTimer, best_of


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
        program = model.program("train", args.batch, args.seq)
        best = best_of(program.pieces, DispatchTimer(model.device), args.rounds)
        kernels = sum_up(program.plan.launches, best)
    total = sum(row.seconds for row in kernels)
    print(f"{model.device.name}: {args.shape}, batch {args.batch}, seq {args.seq}")
    for row in kernels:
        print(f"{row.label:28} {row.launches:5} x {1e3 * row.seconds:10.2f} ms {row.share:7.1%} "
              f"{row.flops_per_second / 1e9:9.1f} GFLOP/s")  # fmt: skip
    print(f"{'all':28} {sum(row.launches for row in kernels):5} x {1e3 * total:10.2f} ms")


if __name__ == "__main__":
    main()
