"""What the card's own code does: instructions, and what stands in loops around multiplications."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from compilers.loops import Turn
from compilers.paths import Instruction, usual_way

# Of products of 16 x 16 x 16, of which an instruction of matrix units makes a part.
_PARTS = {"HMMA.16816": 0.5, "HMMA.1688": 0.25}
_FEW = 32  # operations of a lane in a loop that is told


@dataclass(frozen=True)
class Loop:
    """An innermost loop with products.

    Attributes:
        instructions: Of the usual turn (``compilers.paths``).
        passed: What it passes over.
        counts: How often each instruction is in a turn, by its name; the most frequent ones.
        turn: The same as gpu_estimate.py takes it. Whatever is issued counts, since a SIMD here
            issues one instruction a cycle, of any kind.
    """

    instructions: int
    passed: int
    counts: dict[str, int]
    turn: Turn


def loops(listing: str) -> tuple[int, list[Loop]]:
    """How many instructions a kernel has, and its innermost loops that have products.

    Args:
        listing: What ``nvdisasm -c`` prints.
    """
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif found := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?)\s*;", line):
            code.append(found[1])
    jumps = [
        (at, labels[found[1]])
        for at, line in enumerate(code)
        if (found := re.search(r"BRA.*`\((\.L_x_\d+)\)", line)) and found[1] in labels
    ]
    spans = [(to, at) for at, to in jumps if to <= at]
    busy = [span for span in spans if _turn_of(code[span[0] : span[1] + 1]).flops(1) >= _FEW]
    inner = [
        (begin, end)
        for begin, end in busy
        if not any(begin <= b and e <= end for b, e in busy if (b, e) != (begin, end))
    ]
    return len(code), [_loop(code, *span, jumps) for span in inner]


def _loop(code: list[str], begin: int, end: int, jumps: list[tuple[int, int]]) -> Loop:
    body = code[begin : end + 1]
    targets = {at - begin: to - begin for at, to in jumps if begin <= at <= end}
    has_units = any(_full_name(line).startswith("HMMA") for line in body)

    def nexts(at: int) -> list[int]:
        jump = [targets[at]] if at in targets else []
        return jump if body[at].startswith(("BRA", "EXIT", "RET")) else [at + 1, *jump]

    read = [_read(line, has_units=has_units) for line in body]
    turn = [body[at] for at in usual_way(read, nexts)]
    passed = len(body) - len(turn)
    return Loop(len(turn), passed, dict(_counts(turn).most_common(12)), _turn_of(turn))


def _read(line: str, *, has_units: bool) -> Instruction:
    name = _full_name(line)
    is_product = name.startswith("HMMA" if has_units else "FFMA")
    is_wanted = (name.startswith("LDG") and ".128" in name) or name.startswith("MUFU.EX2")
    return Instruction(int(is_product), is_wanted, int(name.startswith("BAR")))


def main_turn(loops: list[Loop]) -> Turn:
    """Of the loop with most of the products, the first of several alike."""
    most = max((loop.turn.flops(32) for loop in loops), default=0)
    return next((loop.turn for loop in loops if 2 * loop.turn.flops(32) > most), Turn())


def _turn_of(turn: list[str]) -> Turn:
    names = [_full_name(line) for line in turn]
    multiplies = sum(name.startswith("FFMA") for name in names)
    others = sum(not name.startswith(("FFMA", "HMMA")) for name in names)
    return Turn(_matrices(names), multiplies, others, sum(map(_lds_bytes, names)))


def _matrices(names: list[str]) -> int:
    parts = (part for name in names for kind, part in _PARTS.items() if name.startswith(f"{kind}."))
    return round(sum(parts))


def _lds_bytes(name: str) -> int:
    """That a lane reads or writes of workgroup memory."""
    if name.startswith("LDSM"):
        return 4 * int(name[-1] if name[-2] == "." else 1)
    if name.startswith(("LDS", "STS")):
        bits = next((part for part in name.split(".") if part in ("U8", "16", "64", "128")), "32")
        return max(int(bits.removeprefix("U")) // 8, 1)
    return 0


def _counts(code: list[str]) -> Counter[str]:
    return Counter(_name(line) for line in code)


def _name(line: str) -> str:
    """An instruction's name, with its width where it moves data."""
    name = _full_name(line)
    return name if name.startswith(("LDS", "STS", "LDG", "STG")) else name.split(".")[0]


def _full_name(line: str) -> str:
    return re.sub(r"^@!?U?P\w+\s+", "", line).split()[0]
