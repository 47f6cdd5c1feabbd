"""What NVIDIA's compiler makes of the explorers' kernels, without a card, for their order.

usage: python benchmarks/explore_ptxas.py FILE [--only product attention gradients] [--count N]
           [--arch sm_90] [--spirv-cross PROGRAM] [--slangc PROGRAM] [--nvcc PROGRAM]
           [--nvdisasm PROGRAM]

The explorers take FILE as --registers: kernels that spill, or of which a multiprocessor has too few
threads, are tried last. Dawn makes SPIR-V of them on a software GPU with matrix units (Mesa 26),
which passes for a card's; gpu_ptxas.py says what makes that into the card's code, and where its
programs come from. FILE is written anew after every 12 kernels, and kernels in it are not repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import attention_kernel
import explore
import explore_attention
import explore_gradients
import gradient_kernel
from compilers.capture import Capture
from exploring import Bench
from gpu_ptxas import Failure, called, figures

from qlora_wgpu.gpu.adapters import BACKENDS
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.matrix import Limits, MatrixShape

CARD, LIMITS = MatrixShape(16, 16, 16, 32), Limits(1024, 49_152)
# Of a multiprocessor of sm_80 to sm_90 (CUDA C++ programming guide, "Technical specifications").
_REGISTERS, _THREADS, _WORKGROUPS = 65_536, 2048, 32
_MEMORY = {"sm_80": 164 << 10, "sm_86": 100 << 10, "sm_89": 100 << 10, "sm_90": 228 << 10}
_SYSTEM_MEMORY = 1024  # bytes of each workgroup
KINDS = ("product", "attention", "gradients")
_SAVED = 12  # kernels between two writes of the file


def workgroups(threads: int, registers: int, nbytes: int, arch: str) -> int:
    """How many run on a multiprocessor at once."""
    per_subgroup = -(-registers * 32 // 256) * 256
    return min(
        _WORKGROUPS,
        _THREADS // threads,
        _REGISTERS // (per_subgroup * -(-threads // 32)),
        _MEMORY[arch] // (nbytes + _SYSTEM_MEMORY),
    )


def kernels(only: Sequence[str]) -> Iterator[tuple[str, Callable[[], str]]]:
    """Names of the explorers' kernels, in their order and in turns, and what makes their WGSL."""
    heads, unit, limits = explore_attention.HEAD_DIMS, CARD, LIMITS
    found: dict[str, list[list[tuple[str, Callable[[], str]]]]] = {
        "product": [
            [
                (explore.name_of(way), partial(explore.kernel, way, unit))
                for way in explore.ways(unit, limits)
            ]
        ],
        "attention": [
            [
                (
                    explore_attention.name_of(way, head),
                    partial(attention_kernel.kernel, way, unit, head),
                )
                for way in explore_attention.ways(unit, limits, head)
            ]
            for head in heads
        ],
        "gradients": [
            [
                (
                    explore_gradients.name_of(way, head),
                    partial(gradient_kernel.kernel, way, unit, head),
                )
                for way in explore_gradients.ways(unit, limits, kind, head)
            ]
            for head in heads
            for kind in explore_gradients.KINDS
        ],
    }
    for turn in zip_longest(*chain.from_iterable(found[name] for name in only)):
        yield from filter(None, turn)


def compiled(spirv: Path, args: argparse.Namespace) -> dict[str, Any]:
    """A kernel's figures, or why there are none."""
    try:
        found = figures(spirv, spirv.with_suffix(""), args)
    except (Failure, ValueError) as err:
        return {"failure": str(err)}
    threads, registers, nbytes = (
        found[name] for name in ("threads", "registers", "workgroup_bytes")
    )
    count = workgroups(threads, registers, nbytes, args.arch)
    turn = found["turn"]
    return {
        "registers": registers,
        "spilled": found["spill_stores"] + found["spill_loads"],
        "workgroup_bytes": nbytes,
        "threads": threads,
        "workgroups": count,
        "resident_threads": count * threads,
        "others_per_product": round(turn["others"] / max(turn["matrices"], 1), 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--count", type=int, default=600)
    parser.add_argument("--arch", default="sm_90", choices=_MEMORY)
    parser.add_argument("--jobs", type=int, default=2)
    for program in ("spirv-cross", "slangc", "nvcc", "nvdisasm"):
        parser.add_argument(f"--{program}", default=program, help="where this program is")
    args = parser.parse_args()
    report: dict[str, Any] = {"arch": args.arch, "kernels": {}}
    if args.file.exists():
        report = json.loads(args.file.read_text(encoding="utf-8"))
    report["compiler"] = called(args.nvcc, "--version").splitlines()[-1]
    known = report["kernels"]
    todo = [pair for pair in kernels(args.only) if pair[0] not in known][: args.count]
    capture = Capture(CARD)
    capture.install(BACKENDS["dawn"].module)
    device = Device(backend="dawn")
    device.features -= {"subgroup-size-control"}  # a card's size, which this GPU would refuse
    bench = Bench(device)
    for first in range(0, len(todo), _SAVED):
        batch = todo[first : first + _SAVED]
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
            files = [Path(folder) / f"{number}.spv" for number in range(len(batch))]
            for file, (name, source) in zip(files, batch, strict=True):
                file.write_bytes(capture.caught(partial(bench.compiled, source()), name))
            found = pool.map(partial(compiled, args=args), files)
            known |= dict(zip((name for name, _ in batch), found, strict=True))
        rows = ",\n".join(f"  {json.dumps(n)}: {json.dumps(row)}" for n, row in known.items())
        head = json.dumps({n: v for n, v in report.items() if n != "kernels"})[:-1]
        args.file.write_text(f'{head}, "kernels": {{\n{rows}\n}}}}\n', encoding="utf-8")
        for name, _ in batch:
            print(name, known[name], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
