"""The loop that a kernel spends its time in, read off RDNA's assembly.

What converts and counts numbers beyond f16's end is left out, which no lane has in the usual turn:
a branch passes over it, and it names that end. So is what all of a workgroup passes over together
and has barriers of its own, but no products: sums that are rescaled.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

_BLOCK = re.compile(r"^(BB\d+):")
_BRANCH = re.compile(r"^s_c?branch\w* (BB\d+)")
_PASSED = re.compile(r"^s_cbranch_execz (BB\d+)")
_PASSED_BY_ALL = re.compile(r"^s_cbranch_scc[01] (BB\d+)")
_BEYOND = re.compile(r"0x[4c]77fe000")  # 65,504 in float32
_MATRIX_FLOPS = 2 * 16**3
_FMA = re.compile(r"v_(?:pk_)?(?:fma|fmac|mad|mac|dot)|v_dual_fma|:: v_dual_fma")
_BYTES = {"b8": 1, "u8": 1, "b16": 2, "u16": 2, "b32": 4, "b64": 8, "b96": 12, "b128": 16}


@dataclass(frozen=True)
class Turn:
    """What a wave does in one turn of a loop.

    Attributes:
        matrices: Products of matrix units.
        multiplies: Multiply-adds of each lane.
        others: Other vector instructions.
        lds_bytes: Bytes of workgroup memory that each lane reads and writes.
    """

    matrices: int = 0
    multiplies: int = 0
    others: int = 0
    lds_bytes: int = 0

    def flops(self, lanes: int) -> int:
        """Operations of products, of a wave of so many lanes."""
        return _MATRIX_FLOPS * self.matrices + 2 * lanes * self.multiplies


def main_loop(assembly: str) -> Turn:
    """The innermost loop with most of the products in it; all that there is, where none has any.

    Of several alike it is the first: an adapter's term is added up behind the base's.
    """
    lines = _usual([line.split(";")[0].strip() for line in assembly.splitlines()])
    turns = [_turn(lines[begin:end]) for begin, end in sorted(_innermost(lines))]
    most = max((turn.flops(32) for turn in turns), default=0)
    if not most:
        return _turn(lines)
    return next(turn for turn in turns if 2 * turn.flops(32) > most)


def _usual(lines: list[str]) -> list[str]:
    """What is left without the code that hardly any turn gets to."""
    places = {m[1]: i for i, line in enumerate(lines) if (m := _BLOCK.match(line))}
    kept, at = [], 0
    while at < len(lines):
        kept.append(lines[at])
        passed = _PASSED.match(lines[at]) or _PASSED_BY_ALL.match(lines[at])
        end = places.get(passed[1], 0) if passed else 0
        over = lines[at + 1 : end]
        at = end if _names_end(over) or _is_rescaling(over) else at + 1
    return kept


def _is_rescaling(passed: list[str]) -> bool:
    turn = _turn(passed)
    return "s_barrier" in passed and not turn.matrices and not turn.multiplies


def _names_end(passed: list[str]) -> bool:
    """Whether what is passed over names f16's end, but for the sake of a branch within it."""
    own = itertools.takewhile(lambda line: not _PASSED.match(line), passed)
    return any(_BEYOND.search(line) and not line.startswith("v_cmpx") for line in own)


def _innermost(lines: list[str]) -> Iterator[tuple[int, int]]:
    """First and last line of each loop that holds no other."""
    places = {m[1]: i for i, line in enumerate(lines) if (m := _BLOCK.match(line))}
    spans = set()
    for end, line in enumerate(lines):
        if (m := _BRANCH.match(line)) and places.get(m[1], end) < end:
            spans.add((places[m[1]], end))
    for begin, end in spans:
        if not any((b, e) != (begin, end) and begin <= b and e <= end for b, e in spans):
            yield begin, end


def _turn(lines: list[str]) -> Turn:
    matrices = multiplies = others = lds = 0
    for line in lines:
        name = line.split(" ")[0]
        if name.startswith("v_wmma"):
            matrices += 1
        elif name.startswith("v_"):
            found = len(_FMA.findall(line)) * (2 if name.startswith("v_pk_") else 1)
            multiplies += found
            others += not found
        elif name.startswith("ds_"):
            size = _BYTES.get(name.rsplit("_", 1)[-1], 4)
            lds += size * (2 if "2addr" in name or "read2" in name or "write2" in name else 1)
    return Turn(matrices, multiplies, others, lds)
