"""Times Mamba 2's scan in chunks, beside one token at a time, and its share of a training step.

usage: python benchmarks/mamba_scan.py [--seq N] [--rounds N] [--backend NAME] [--json FILE]

The shape is that of Granite 4.0 H 350M, of which a step trains six layers with Mamba and two with
attention. One token at a time is the kernel that decodes, launched once for each token: it has no
gradient, and what a launch itself costs is included.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig
from qlora_wgpu.bench.measure import time_kernels
from qlora_wgpu.bench.timing import DispatchTimer, best_of
from qlora_wgpu.bench.workload import RandomFolder
from qlora_wgpu.bfloat16 import to_bfloat16
from qlora_wgpu.config import OptimConfig
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.plan import compile_plan
from qlora_wgpu.graph.program import BufferPool, Program
from qlora_wgpu.graph.tensor import Storage, Tensor, matrix, row, vector
from qlora_wgpu.kernels import mamba_scan as kernels
from qlora_wgpu.ops.mamba import scan_kernels
from qlora_wgpu.training.optimizer import Optimizer

HEADS, HEAD_DIM, STATE_SIZE = 48, 32, 128
CONFIG = {
    "model_type": "granitemoehybrid", "hidden_size": 768, "intermediate_size": 2048,
    "shared_intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 12,
    "num_key_value_heads": 4, "vocab_size": 8192, "num_local_experts": 0,
    "layer_types": ["mamba", "mamba", "mamba", "attention"] * 2, "position_embedding_type": "nope",
    "mamba_n_heads": HEADS, "mamba_d_head": HEAD_DIM, "mamba_d_state": STATE_SIZE,
    "mamba_n_groups": 1, "tie_word_embeddings": True,
}  # fmt: skip


def problem(rows: int, chunk: int) -> kernels.MambaScan:
    """A scan of one sample, of random numbers."""
    random = np.random.default_rng(0)

    def given(make: Any, name: str, *shape: int, operand: bool = False) -> Tensor:
        data = random.uniform(0.1, 1.0, shape).astype(np.float32)
        held = to_bfloat16(data) if operand else data
        storage = Storage(name, "timing", held.nbytes, held)
        return make(name, *shape, "bfloat16" if operand else "float32", storage)

    ones = np.ones(rows, np.uint32)
    return kernels.MambaScan(
        given(matrix, "x", rows, HEADS * HEAD_DIM, operand=True),
        given(matrix, "bc", rows, 2 * STATE_SIZE, operand=True),
        given(matrix, "dt", rows, HEADS),
        given(row, "a_log", HEADS),
        given(row, "d", HEADS),
        vector("segments", rows, "uint32", Storage("segments", "timing", ones.nbytes, ones)),
        1,
        HEADS,
        STATE_SIZE,
        chunk,
    )


def forward_seconds(device: Device, rows: int, chunk: int, rounds: int) -> float:
    """The time of a forward pass over all tokens in chunks."""
    g = Graph("bfloat16", device.profile, device.max_binding)
    p = problem(rows, chunk)
    y = g.operand("y", rows, p.x.columns)
    scan_kernels(device.profile).forward(g, p, y)
    return _seconds(device, g, y, rounds)


def token_seconds(device: Device, rounds: int) -> float:
    """The time of one token by the kernel that decodes."""
    g = Graph("bfloat16", device.profile, device.max_binding)
    p, zeros = problem(1, kernels.CHUNK), np.zeros((HEADS * STATE_SIZE, HEAD_DIM), np.float32)
    state = matrix(
        "state", *zeros.shape, "float32", Storage("state", "timing", zeros.nbytes, zeros)
    )
    first = np.zeros(1, np.uint32)
    places = vector("places", 1, "uint32", Storage("places", "timing", first.nbytes, first))
    y = g.operand("y", 1, p.x.columns)
    kernels.step(g, p, state, places, y)
    return _seconds(device, g, y, rounds)


def _seconds(device: Device, g: Graph, y: Tensor, rounds: int) -> float:
    program = Program(device, compile_plan(g, (y,)), BufferPool(device))
    return float(sum(best_of(program.pieces, DispatchTimer(device), rounds)))


def step_shares(device: Device, rows: int, rounds: int) -> dict[str, float]:
    """The seconds of a step's kernels, by whether they belong to the scan."""
    model = QLoRAModel.from_folder(
        RandomFolder(CONFIG, quant=QuantConfig()), LoraConfig(), QuantConfig(), "bfloat16", device,
        name_or_path="random",
    )  # fmt: skip
    model.prepare(1, rows)
    timed = time_kernels(model, Optimizer(model, OptimConfig(), 1), 1, rows, rounds)
    scan = sum(kernel.seconds for kernel in timed if kernel.label.startswith("mamba_scan"))
    return {"scan": scan, "all": sum(kernel.seconds for kernel in timed)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3, help="the best of so many counts")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = Device(backend=args.backend)
    token = token_seconds(device, args.rounds)
    report = {
        "device": device.name,
        "driver": device.gpu.info["description"],
        "backend": device.backend.name,
        "tokens": args.seq,
        "forward_ms_by_chunk": {
            str(chunk): round(1e3 * forward_seconds(device, args.seq, chunk, args.rounds), 2)
            for chunk in (16, 32, 64)
        },
        "one_token_at_a_time_ms": round(1e3 * token * args.seq, 2),
        "step_ms": {
            name: round(1e3 * seconds, 1)
            for name, seconds in step_shares(device, args.seq, args.rounds).items()
        },
    }
    print(json.dumps(report, indent=1))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
