"""How full attention's workgroups keep a card, by the order in which they begin: estimated.

usage: python benchmarks/gpu_order.py [TIMED] [--compiled FILE] [--cores N] [--ceiling TFLOPS]

TIMED has attention's tiles by head and rows, as gpu_attention.py timed them on a card before its
workgroups were put in order: all blocks of one head began before those of the next. A workgroup of
causal attention takes as many turns as there are blocks that its own sees, or is seen by, and the
last head's longest walks began when other cores were about to be done.

Each core is given workgroups in their order, as many at a time as its registers last for by what
nvcc made of the kernel (FILE), and does the same in all whether they are many or few. Which of the
cores that are done at once comes first is left to chance: workgroups take up to SPREAD longer, and
shares are means of RUNS.

What was timed, over the share of their time that cores are at work so, is what a full card would
do; if the model holds, that is the same for all rows. Times the share of the present order, blocks
before heads, it is what to expect now.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

RESULTS = Path(__file__).parent / "results"
KERNELS = ("forward", "dq", "dkdv")
REGISTERS, ALLOCATED = 65_536, 8  # of a core; an invocation's are a multiple
BLOCK = 64  # rows of a workgroup (kernels/attention/workgroup.py)
HEADS, KV_HEADS = 32, 8  # as gpu_attention.py has them
SPREAD, RUNS = 0.02, 8


def busy_share(turns: Sequence[int], cores: int, resident: int) -> float:
    """The share of their time that cores are at work, with workgroups begun in their order.

    Args:
        turns: What each workgroup has to do.
        cores: How many there are.
        resident: Workgroups that a core has at a time, between which it divides itself.
    """
    shares = []
    for seed in range(RUNS):
        chance = random.Random(seed)
        taken = [each * (1 + SPREAD * chance.random()) for each in turns]
        shares.append(sum(taken) / (cores * _time(taken, cores, resident)))
    return fmean(shares)


def _time(turns: Sequence[float], cores: int, resident: int) -> float:
    waiting = list(reversed(turns))
    left: list[list[float]] = [[] for _ in range(cores)]
    for _ in range(resident):
        for own in left:
            if waiting:
                own.append(waiting.pop())
    # When each core's next workgroup ends.
    ends = [(min(own) * len(own), core) for core, own in enumerate(left) if own]
    heapq.heapify(ends)
    time = 0.0
    while ends:
        time, core = heapq.heappop(ends)
        done = min(left[core])
        left[core] = [turn - done for turn in left[core] if turn > done]
        while waiting and len(left[core]) < resident:
            left[core].append(waiting.pop())
        if own := left[core]:
            heapq.heappush(ends, (time + min(own) * len(own), core))
    return time


def walks(kernel: str, rows: int, *, each_head: bool, in_order: bool) -> list[int]:
    """Turns of a launch's workgroups in the order in which they begin.

    Args:
        kernel: One of ``KERNELS``.
        rows: Queries, and keys.
        each_head: Whether dk and dv are made for each head apart.
        in_order: Whether all heads' first blocks begin first, as they do now.
    """
    blocks = -(-rows // BLOCK)
    together = HEADS // KV_HEADS if kernel == "dkdv" and not each_head else 1
    # The block with the longest walk is a head's first in either order.
    longest_first = [together * turns for turns in range(blocks, 0, -1)]
    heads = HEADS // together
    if in_order:
        return [turns for turns in longest_first for _ in range(heads)]
    return longest_first * heads


def resident_workgroups(kernel: str, head_dim: int, compiled: list[dict[str, Any]]) -> int:
    """Workgroups that a core's registers last for.

    Raises:
        LookupError: If the kernel was not compiled for such heads.
    """
    for row in compiled:
        name = row["kernel"]
        if name.startswith(f"attention/{kernel}_tiled.") and f"HEAD_UNITS={head_dim // 4}," in name:
            each = -(-row["registers"] // ALLOCATED) * ALLOCATED
            return int(REGISTERS // (each * row["threads"]))
    raise LookupError(f"{kernel} with heads of {head_dim} is not among what was compiled")


def expected(row: dict[str, Any], compiled: list[dict[str, Any]], cores: int) -> list[list[float]]:
    """Of each kernel what was timed, its share of a full card, that card's, and what is now due.

    Rates are TFLOP/s.
    """
    head_dim, rows = (int(n) for n in re.findall(r"head_dim (\d+), seq (\d+)", row["key"])[0])
    each_head = "attention/sum_heads" in row["us"]
    found = []
    for kernel in KERNELS:
        resident = resident_workgroups(kernel, head_dim, compiled)
        before, now = (
            busy_share(walks(kernel, rows, each_head=each_head, in_order=in_order), cores, resident)
            for in_order in (False, True)
        )
        timed = row["gflops"][f"attention/{kernel}"] / 1000
        found.append([timed, before, timed / before, timed / before * now])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("timed", type=Path, nargs="?", default=RESULTS / "nvidia-h100-before.json")
    parser.add_argument("--compiled", type=Path, default=RESULTS / "ptxas-sm90.json")
    parser.add_argument("--cores", type=int, default=132, help="of the card")
    parser.add_argument("--ceiling", type=float, default=64.0, help="its TFLOP/s in float32")
    args = parser.parse_args()
    compiled = json.loads(args.compiled.read_text(encoding="utf-8"))["kernels"]
    timed = json.loads(args.timed.read_text(encoding="utf-8"))["attention"]["attention-dawn"]
    print("heads of   rows  kernel    timed  busy  full card  now (of the ceiling)")
    for row in timed:
        if "attention_kind tiled" not in row["key"]:
            continue
        head_dim, rows = re.findall(r"head_dim (\d+), seq (\d+)", row["key"])[0]
        for kernel, figures in zip(KERNELS, expected(row, compiled, args.cores), strict=True):
            was, busy, full, now = figures
            print(
                f"{head_dim:>8} {rows:>6}  {kernel:8} {was:6.1f}  {busy:.2f}  {full:9.1f}  "
                f"{now:.1f} ({now / args.ceiling:.0%})"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
