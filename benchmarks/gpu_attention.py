"""Attention alone: forward, dq and dk/dv by head size and sequence, for each of the tuner's cuts.

usage: python benchmarks/gpu_attention.py OUT [--backend NAME] [--heads N] [--kv-heads N]
           [--head-dim N ...] [--seq N ...]

OUT.jsonl gets a row each, with the clock that the GPU had in the end, as a part of the highest that
was seen; the best of a few rounds counts.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from gpu_rows import Rows

from qlora_wgpu.bench.timing import DispatchTimer, best_of
from qlora_wgpu.bfloat16 import to_bfloat16
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.kernel_config import Profile
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.plan import compile_plan
from qlora_wgpu.graph.program import BufferPool, Program
from qlora_wgpu.graph.tensor import Storage, Tensor, matrix, pad_rows
from qlora_wgpu.kernels import tunables
from qlora_wgpu.model.batch_encoding import encode_batch
from qlora_wgpu.ops.attention import attention
from qlora_wgpu.ops.batch import make_batch_buffers
from qlora_wgpu.tuning.tuner import bases, candidates, fields_of

_LEAST_ROUNDS, _MOST_ROUNDS = 2, 6
_ENOUGH_SECONDS = 0.5  # of the GPU's work


def given(name: str, rows: int, columns: int, texture: bool) -> Tensor:
    values = np.random.default_rng(len(name)).standard_normal((rows, columns), dtype=np.float32)
    data = to_bfloat16(pad_rows(values))
    storage = Storage(name, "timing", data.nbytes, data, texture)
    return matrix(name, rows, columns, "bfloat16", storage)


def timed(
    device: Device, profile: Profile, args: argparse.Namespace, head_dim: int, seq: int
) -> Any:
    graph = Graph("bfloat16", profile, device.max_binding)
    batch = make_batch_buffers(1, seq)
    ones = np.ones((1, seq), np.int64)
    batch.storage.data = encode_batch(batch, 0 * ones, ones, None)
    q = given("queries", seq, args.heads * head_dim, profile.textures)
    k = given("keys", seq, args.kv_heads * head_dim, profile.textures)
    v = given("v", seq, args.kv_heads * head_dim, profile.textures)
    dout = given("gradient", seq, args.heads * head_dim, profile.textures)
    for tensor in (q, k, v):
        tensor.requires_grad = True
    o = attention(graph, q, k, v, batch, head_dim, head_dim**-0.5)
    graph.add_gradient(o, dout)
    graph.backward()
    results = (o, *(graph.gradient_of(tensor) for tensor in (q, k, v)))
    program = Program(device, compile_plan(graph, results), BufferPool(device))
    program.run()
    timer = DispatchTimer(device)
    best = best_of(program.pieces, timer, _MOST_ROUNDS, least=_LEAST_ROUNDS, enough=_ENOUGH_SECONDS)
    seconds: Counter[str] = Counter()
    flops: Counter[str] = Counter()
    for launch, took in zip(program.plan.launches, best, strict=True):
        seconds[launch.label] += took
        flops[launch.label] += launch.flops
    rates = {label: flops[label] / max(took, 1e-9) for label, took in seconds.items()}
    return {
        "us": {label: round(1e6 * took, 1) for label, took in seconds.items()},
        "gflops": {label: round(rate / 1e9, 1) for label, rate in rates.items() if rate},
        "matrix_units": any("subgroup_matrix" in x.shader.code for x in program.plan.launches),
        "clock": round(timer.load.clock(), 3),
    }


def cuts(device: Device) -> dict[str, Profile]:
    """The default, and what differs from it in attention."""
    tunable = next(t for t in tunables() if t.name == "attention")
    named: dict[str, Profile] = {}
    for profile in (device.profile, *bases(device.profile)[1:], *candidates(device.profile)):
        own = fields_of(tunable, device.profile, profile)
        text = ", ".join(f"{name} {value}" for name, value in own.items())
        kind = "textures" if profile.textures else "buffers"
        named.setdefault(f"{kind} {text}".strip(), profile)
    return named


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", nargs="*", type=int, default=[64, 128])
    parser.add_argument("--seq", nargs="*", type=int, default=[1024, 2048, 8192])
    args = parser.parse_args()
    device = Device(backend=args.backend)
    rows = Rows(Path(f"{args.out}.jsonl"))
    for seq in args.seq:
        for head_dim in args.head_dim:
            for name, profile in cuts(device).items():

                def measure(
                    profile: Profile = profile, head_dim: int = head_dim, seq: int = seq
                ) -> dict[str, Any]:
                    return timed(device, profile, args, head_dim, seq)

                rows.measure(f"head_dim {head_dim}, seq {seq}: {name}", measure)


if __name__ == "__main__":
    main()
