"""Draws the plots of docs/performance.md and of notes/measurements.md from benchmarks/results.

usage: python benchmarks/plot.py     (needs matplotlib)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
PICTURES = Path(__file__).parent.parent / "docs" / "images"
plt.rcParams["svg.hashsalt"] = "qlora-wgpu"  # the same picture for the same figures


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def peers() -> None:
    runs = [
        ("S, batch 1", "llvmpipe-mesa22-zen5-compare-S"),
        ("S, batch 4", "llvmpipe-mesa22-zen5-compare-S-batch4"),
        ("M, batch 1", "llvmpipe-mesa22-zen5-compare-M"),
    ]
    figure, axes = plt.subplots(1, len(runs), figsize=(10, 3.2), layout="constrained")
    for axis, (title, name) in zip(axes, runs, strict=True):
        contenders = read(name)["contenders"]
        names = list(contenders)
        rates = [contenders[n]["tokens_per_second"] for n in names]
        low = [r - contenders[n]["spread"][0] for n, r in zip(names, rates, strict=True)]
        high = [contenders[n]["spread"][1] - r for n, r in zip(names, rates, strict=True)]
        colours = ["tab:blue" if n.startswith("ours") else "tab:gray" for n in names]
        axis.barh(names, rates, color=colours, xerr=[low, high], error_kw={"lw": 1})
        axis.invert_yaxis()
        axis.set_title(title)
        axis.set_xlabel("tokens/s")
    figure.savefig(PICTURES / "peers.svg", metadata={"Date": None})


def sweep() -> None:
    sweeps = read("llvmpipe-mesa22-sweep")
    figure, axes = plt.subplots(1, len(sweeps), figsize=(11, 3), layout="constrained")
    for axis, (name, rows) in zip(axes, sweeps.items(), strict=True):
        sizes = [row[name] for row in rows]
        axis.plot(sizes, [row["tokens_per_second"] for row in rows], "o-", color="tab:blue")
        axis.set_ylim(bottom=0)
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.set_xlabel(name)
        other = axis.twinx()
        other.plot(sizes, [row["planned_mib"] for row in rows], "s--", color="tab:orange")
        other.set_ylim(bottom=0)
        if axis is axes[0]:
            axis.set_ylabel("tokens/s", color="tab:blue")
        if axis is axes[-1]:
            other.set_ylabel("planned MiB", color="tab:orange")
    figure.savefig(PICTURES / "sweep.svg", metadata={"Date": None})


if __name__ == "__main__":
    PICTURES.mkdir(parents=True, exist_ok=True)
    peers()
    sweep()
