"""Training steps beside rivals' on the same card, in turns: PEFT in several ways, and Unsloth.

usage: python benchmarks/gpu_rivals.py OUT SHAPE [--backend NAME] [--peft PYTHON] [--folder FOLDER]
           [--only NAME ...] [--works WORK ...] [--rounds N] [--steps N] [--busy SECONDS]
           [--patience SECONDS]

A WORK is BATCHxSEQ, or BATCHxSEQp for packed rows, of rank 8 and 16. FOLDER gets the model, random
weights in NF4 (bitsandbytes' files), which all read. Every participant is a process that stays
loaded and has its turn, so the card has to have room for all models and one's step; after a turn
PyTorch's processes give back all but the weights. Nothing is checkpointed. OUT.jsonl gets a row a
turn; a participant that fails has rows that say why, and is tried again with the next work.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from gpu_rows import Rows
from gpu_watch import watch_process
from participants import PEERS, Team
from random_model import write_random_model

from qlora_wgpu.bench.workload import SHAPES, config_of
from qlora_wgpu.config import QuantConfig

sys.path.append(str(PEERS))
from turns import Work

OURS = "ours"
RIVALS = {
    "peft": ("peft_turns.py",),
    "peft-graphs": ("peft_turns.py", "--graphs"),
    "unsloth": ("unsloth_turns.py",),
    "peft-compile": ("peft_turns.py", "--compile"),
    "peft-compile-graphs": ("peft_turns.py", "--compile", "--graphs"),
}
_RANK, _PACKED_RANK = 8, 16


def work_of(text: str, steps: int, busy: float) -> Work:
    """The work that an argument names."""
    found = re.fullmatch(r"(\d+)x(\d+)(p?)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text} is not like 4x1024 or 2x2048p")
    packed = bool(found[3])
    rank = _PACKED_RANK if packed else _RANK
    return Work(int(found[1]), int(found[2]), rank, packed, steps, busy)


def whole_model(folder: Path, shape: str) -> Path:
    """The folder of the model, which is written unless it is there."""
    done = folder / "whole"
    if not done.exists():
        write_random_model(folder, config_of(shape), QuantConfig())
        done.touch()
    return folder


def key_of(work: Work, turn: int, name: str) -> str:
    return f"{work.name}, {turn + 1}, {name}"


def measured(
    rows: Rows, works: Sequence[Work], rounds: int, commands: Mapping[str, Sequence[str]],
    asked: Mapping[str, Any], patience: float,
) -> None:  # fmt: skip
    """All turns that are still to come, of one adapter's rank after the other."""
    for rank in dict.fromkeys(work.rank for work in works):
        team = Team(commands, {**asked, "rank": rank}, patience, watch_process)
        for work in (each for each in works if each.rank == rank):
            _measure(rows, work, rounds, list(commands), team)
        team.end()


def _measure(rows: Rows, work: Work, rounds: int, names: Sequence[str], team: Team) -> None:
    """One work; who begins changes with every round."""
    order = [(turn, name) for turn in range(rounds) for name in _rotated(names, turn)]
    left = [(turn, name) for turn, name in order if rows.lack(key_of(work, turn, name))]
    about = team.load(list(dict.fromkeys(name for _, name in left)))
    for name, values in about.items():
        rows.measure(f"about, {work.rank}, {name}", partial(dict, values))
    for turn, name in left:
        rows.measure(key_of(work, turn, name), partial(team.turn, name, asdict(work)))


def _rotated(names: Sequence[str], by: int) -> list[str]:
    at = by % len(names)
    return [*names[at:], *names[:at]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--peft", default=sys.executable, help="a Python with rivals' packages")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=RIVALS, default=list(RIVALS))
    parser.add_argument("--works", nargs="+", default=["1x1024", "4x1024", "2x2048p"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--busy", type=float, default=1.0, help="seconds of steps before")
    parser.add_argument("--patience", type=float, default=200.0)
    args = parser.parse_args()
    works = [work_of(text, args.steps, args.busy) for text in args.works]
    folder = whole_model(args.folder or Path(f"{args.out}-model"), args.shape).resolve()
    commands = {OURS: [sys.executable, str(PEERS / "ours_turns.py")]}
    for name in args.only:
        script, *options = RIVALS[name]
        commands[name] = [args.peft, str(PEERS / script), *options]
    # What is compiled once is known to the next call.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder.parent / "inductor"))
    asked = {
        "folder": str(folder), "backend": args.backend, "longest": max(w.seq for w in works),
    }  # fmt: skip
    rows = Rows(Path(f"{args.out}.jsonl"), minded=True)
    measured(rows, works, args.rounds, commands, asked, args.patience)


if __name__ == "__main__":
    main()
