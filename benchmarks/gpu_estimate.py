"""What a step should take on cards that nobody had: estimated from compiled kernels, not measured.

usage: python benchmarks/gpu_estimate.py [--json FILE] [--family navi31] [--backend NAME]
           [--products KIND ...] [--model NAME ...] [--seq N] [--folder FOLDER] [--turns FILE]

Every launch of a step is traced with its operations, bytes and workgroups; RADV compiles its kernel
(``gpu_compiler.py``), and a turn of the kernel's main loop tells how many cycles a wave spends on
how many of those operations. A launch takes the longest of three: the cycles of its loop on all of
a card's SIMDs that its workgroups fill, its bytes, its instructions taken once; and a gap after it.

What is assumed, and none of it was seen on these cards: waves wait as long as EFFICIENCY leaves,
copies reach COPIES of a card's bandwidth, a launch is followed by GAP, and another maker's compiler
makes as many instructions of a loop as RADV does, but where ``--turns`` names what gpu_ptxas.py
found of NVIDIA's.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compilers.driver import Compiler, Outcome
from compilers.drivers import amd
from compilers.loops import Turn, main_loop
from compilers.plans import MODELS, profiles, step_launches
from gpu_compiler import Front, compiled

from qlora_wgpu.errors import QLoRAError
from qlora_wgpu.gpu.adapters import BACKENDS
from qlora_wgpu.gpu.kernel_config import GPU_PROFILE
from qlora_wgpu.graph.launch import Launch

EFFICIENCY, COPIES, GAP = 0.65, 0.85, 3e-6
_LANES = 32  # that a SIMD computes in a cycle, of all these cards


@dataclass(frozen=True)
class Card:
    """A card by what its maker says of it.

    Attributes:
        units: Compute units, or multiprocessors.
        simds: SIMDs of each.
        clock: Cycles a second.
        matrix_cycles: Of a SIMD for 16 x 16 x 16 in f16 with float32 sums.
        lds_bytes: Of workgroup memory that a unit reads in a cycle.
        bandwidth: Bytes a second.
        is_nvidia: Whether it is of NVIDIA, whose compiler makes its loops.
    """

    units: int
    simds: int
    clock: float
    matrix_cycles: float
    lds_bytes: float
    bandwidth: float
    is_nvidia: bool = True


CARDS = {
    "RX 7900 XTX": Card(96, 2, 2.5e9, 32, 128, 0.96e12, is_nvidia=False),
    "RTX 3060": Card(28, 4, 1.78e9, 64, 128, 0.36e12),
    "H200": Card(132, 4, 1.98e9, 13.8, 128, 4.3e12),
}


def loop_seconds(card: Card, launch: Launch, turn: Turn, lanes: int) -> float:
    """Of the products of a launch."""
    made = turn.flops(lanes)
    if not launch.flops or not made:
        return 0.0
    waves = lanes / _LANES
    vector = (turn.multiplies + turn.others) * waves
    shared = turn.lds_bytes * lanes * card.simds / card.lds_bytes
    cycles = max(vector + turn.matrices * card.matrix_cycles, shared)
    groups = math.prod(launch.workgroups)
    filled = groups / (card.units * math.ceil(groups / card.units))
    per_second = made / cycles * card.units * card.simds * card.clock * filled * EFFICIENCY
    return launch.flops / per_second


def seconds(card: Card, launch: Launch, outcome: Outcome, turn: Turn) -> tuple[float, str]:
    """Of a launch, and what it waits for."""
    figures = outcome.figures or {"instructions": 0, "subgroup_size": 64}
    lanes = figures["subgroup_size"]
    waves = math.prod(launch.workgroups) * -(-math.prod(launch.shader.workgroup_size) // lanes)
    cycles = figures["instructions"] * waves * lanes / _LANES
    once = cycles / (card.units * card.simds * card.clock * EFFICIENCY)
    ways = {
        "loop": loop_seconds(card, launch, turn, lanes),
        "bytes": launch.nbytes / (card.bandwidth * COPIES),
        "instructions": once,
    }
    bound = max(ways, key=ways.__getitem__)
    return ways[bound] + GAP, bound


def estimated(
    launches: list[Launch],
    outcomes: dict[str, Outcome],
    turns: dict[str, Turn],
    nvidias: dict[str, Turn],
    tokens: int,
) -> dict[str, Any]:
    """A step's milliseconds on each card, and by kernels."""
    by_card: dict[str, Any] = {}
    for name, card in CARDS.items():
        known = turns | nvidias if card.is_nvidia else turns
        kernels: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for launch in launches:
            label = launch.shader.label
            took, bound = seconds(card, launch, outcomes[label], known.get(label, Turn()))
            row = kernels[launch.label]
            row["ms"] += 1e3 * took
            row["launches"] += 1
            row["tflop"] += launch.flops / 1e12
            row[f"by {bound}"] += 1
        total = sum(row["ms"] for row in kernels.values())
        longest = sorted(kernels.items(), key=lambda each: -each[1]["ms"])
        by_card[name] = {
            "ms": round(total, 2),
            "tokens_per_second": round(1e3 * tokens / total),
            "kernels": {
                label: {
                    k: round(v, 3) for k, v in (dict(row) | {"share": row["ms"] / total}).items()
                }
                for label, row in longest
            },
        }
    return by_card


def nvidias_turns(file: Path) -> dict[str, Turn]:
    """A turn of each kernel's main loop, by NVIDIA's compiler."""
    kernels = json.loads(file.read_text(encoding="utf-8"))["kernels"]
    found = {row["kernel"]: Turn(**row["turn"]) for row in kernels if "turn" in row}
    return {label: turn for label, turn in found.items() if turn.flops(_LANES)}


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    compiler = Compiler(amd.DRIVER, args.family)
    front = Front(args.backend, compiler.units)
    wanted = front.has_matrix_units or "matrix" in args.products
    looked_at = profiles(GPU_PROFILE, args.products, compiler.units if wanted else None)
    plans = {
        f"{model}, {kind}": step_launches(model, profile, args.seq)
        for model in args.model
        for kind, profile in looked_at.items()
    }
    shaders = {x.shader.label: x.shader for launches in plans.values() for x in launches}
    outcomes = compiled(front, compiler, shaders.values(), folder)
    turns = {}
    for number, (label, shader) in enumerate(shaders.items()):
        file = next(folder.glob(f"{number:03}-*.s"), None)
        if file is not None and any(
            x.flops for p in plans.values() for x in p if x.shader is shader
        ):
            turns[label] = main_loop(file.read_text(encoding="utf-8"))
    loops = {label: asdict(turn) for label, turn in turns.items()}
    nvidias = {} if args.turns is None else nvidias_turns(args.turns)
    steps = {
        name: estimated(each, outcomes, turns, nvidias, args.seq) for name, each in plans.items()
    }
    cards = {name: asdict(card) for name, card in CARDS.items()}
    assumed = {"efficiency": EFFICIENCY, "copies": COPIES, "gap": GAP}
    return {"measured": False, "assumed": assumed, "cards": cards, "loops": loops, "steps": steps}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="a file for all figures")
    parser.add_argument("--family", default="navi31")
    parser.add_argument("--backend", choices=sorted(BACKENDS), default="dawn")
    parser.add_argument(
        "--products", nargs="+", choices=("register", "tiled", "matrix"), default=["tiled"]
    )
    parser.add_argument("--model", nargs="+", default=list(MODELS))
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--folder", type=Path, help="for SPIR-V and assembly")
    parser.add_argument("--turns", type=Path, help="what gpu_ptxas.py --json wrote")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            report = run(args, folder)
        except QLoRAError as err:
            print(f"error: {err}", file=sys.stderr)
            return 2
    for name, step in report["steps"].items():
        for card, found in step.items():
            print(f"{name}, {card}: {found['ms']} ms, {found['tokens_per_second']:,} tokens/s")
            for label, row in list(found["kernels"].items())[:8]:
                print(f"  {label}: {row['launches']} x, {row['ms']:.2f} ms, {row['share']:.0%}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
