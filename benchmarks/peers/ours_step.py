"""Times the same steps of qlora-wgpu; run by benchmarks/compare.py. Prints one JSON object."""

from __future__ import annotations

import argparse
import json
import resource
import time
from importlib.metadata import version

import numpy as np

from qlora_wgpu import LoraConfig, QLoRAModel, __version__
from qlora_wgpu.config import OptimConfig
from qlora_wgpu.training.optimizer import Optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--adapter")
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--compute", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--checkpointing", action="store_true")
    args = parser.parse_args()
    begin = time.perf_counter()
    model = QLoRAModel.from_pretrained(
        args.model,
        lora=LoraConfig(r=args.rank, lora_alpha=2 * args.rank),
        compute_dtype=args.compute,
        gradient_checkpointing=args.checkpointing,
    )
    if args.adapter:
        model.load_adapter(args.adapter)
    ids = np.random.default_rng(1).integers(
        0, model.architecture.vocab_size, (args.batch, args.seq)
    )
    checked = model.checked(ids, ids)
    optim = OptimConfig(lr_scheduler_type="constant")
    optimizer = Optimizer(model, optim, args.steps)
    model.zero_gradient()
    seconds, losses = [], []
    for step in range(1, args.steps + 1):
        start = time.perf_counter()
        tokens = model.accumulate(*checked)
        optimizer.step(step)
        losses.append(float(model.read_stats()[0]) / tokens)
        model.zero_stats()
        seconds.append(time.perf_counter() - start)
        if step == 1:
            first = time.perf_counter() - begin
    result = {
        "seconds": seconds,
        "losses": losses,
        "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
        "device_mib": model.device.memory.peak / 2**20,
        "first_step_seconds": first,
        "device": model.device.name,
        "driver": model.device.gpu.info["description"],
        "versions": {"qlora-wgpu": __version__, "wgpu": version("wgpu"), "numpy": np.__version__},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
