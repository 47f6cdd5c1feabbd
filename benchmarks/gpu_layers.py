"""Every launch of one layer and the head, for each way of cutting kernels that a tuner tries.

usage: python benchmarks/gpu_layers.py OUT SHAPE [--backend NAME] [--seq N] [--batch N]

SHAPE is a preset's name or a config.json. OUT.jsonl gets a row a variant, all its launches with
their time, less that of a launch that does nothing, and the clock that the GPU had in the end, as a
part of the highest that was seen.
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from gpu_rows import Rows

from qlora_wgpu.bench.roofline import measure_gaps
from qlora_wgpu.bench.timing import DispatchTimer, best_of, clocked
from qlora_wgpu.bench.workload import RandomFolder, RandomWeight, find_shape
from qlora_wgpu.config import LoraConfig, QuantConfig
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.kernel_config import Profile
from qlora_wgpu.graph.launch import Launch
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.tuning.tuner import bases, candidates

_LEAST_ROUNDS, _MOST_ROUNDS, _ENOUGH_SECONDS = 4, 11, 0.5  # of the GPU's work
_OPERANDS = ("x", "w", "q", "k", "y", "o", "dq", "dk")


class _Kept(RandomFolder):
    """Random weights that are made once for all variants."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config, quant=QuantConfig())
        self._kept: dict[str, RandomWeight] = {}

    def find(self, name: str) -> RandomWeight | None:
        weight = super().find(name)
        if weight is not None and name not in self._kept:
            weight.read = cache(weight.read)  # type: ignore[method-assign]
            self._kept[name] = weight
        return self._kept.get(name)


def variants(default: Profile) -> list[tuple[str, Profile]]:
    """By what differs from the default."""
    named = {"default": default}
    for base in bases(default):
        for profile in (base, *candidates(base)):
            changes = [
                f"{f.name} {getattr(profile, f.name)}"
                for f in fields(Profile)
                if getattr(profile, f.name) != getattr(default, f.name)
            ]
            named.setdefault("; ".join(changes) or "default", profile)
    return list(named.items())


def one_layer(config: dict[str, Any]) -> dict[str, Any]:
    """The model of a single layer; the head is the embedding, which saves memory alone."""
    lists = {
        name: value[:1]
        for name, value in config.items()
        if isinstance(value, list) and len(value) == config["num_hidden_layers"]
    }
    return {**config, **lists, "num_hidden_layers": 1, "tie_word_embeddings": True}


def timed(
    device: Device, folder: _Kept, profile: Profile, batch: int, seq: int, idle: float
) -> dict[str, Any]:
    device.profile = profile
    model = QLoRAModel.from_folder(
        folder, LoraConfig(r=8, lora_alpha=16), QuantConfig(), "bfloat16", device,
        name_or_path="one layer",
    )  # fmt: skip
    with clocked(device, "_compile") as compiling:
        model.prepare(batch, seq)
    ids = np.random.default_rng(0).integers(0, model.architecture.vocab_size, (batch, seq))
    model.zero_gradient()
    model.accumulate(*model.checked(ids, ids))
    model.read_stats()
    program, timer = model.program("train", batch, seq), DispatchTimer(device)
    best = best_of(program.pieces, timer, _MOST_ROUNDS, least=_LEAST_ROUNDS, enough=_ENOUGH_SECONDS)
    launches = [
        described(launch, max(seconds - idle, 0.0))
        for launch, seconds in zip(program.plan.launches, best, strict=True)
    ]
    return {
        "compile_seconds": compiling.seconds,
        "clock": round(timer.load.clock(), 3),
        "launches": launches,
    }


def described(launch: Launch, seconds: float) -> dict[str, Any]:
    shapes = {n: list(t.shape) for n, t in launch.tensors.items() if n in _OPERANDS}
    return {
        "label": launch.label,
        "path": launch.path,
        "shapes": shapes,
        "workgroups": launch.workgroups,
        "matrix_units": "subgroup_matrix" in launch.shader.code,
        "flops": launch.flops,
        "bytes": launch.nbytes,
        "us": round(1e6 * seconds, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("shape")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1)
    args = parser.parse_args()
    device = Device(backend=args.backend)
    idle = measure_gaps(device).timed
    folder = _Kept(one_layer(dict(find_shape(args.shape).config)))
    rows = Rows(Path(f"{args.out}.jsonl"))
    for name, profile in variants(device.profile):

        def measure(profile: Profile = profile) -> dict[str, Any]:
            return timed(device, folder, profile, args.batch, args.seq, idle)

        rows.measure(name, measure)
        gc.collect()  # what a failed variant holds


if __name__ == "__main__":
    main()
