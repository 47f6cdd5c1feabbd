"""Chooses a few checks that execute every statement of a run's shaders.

Statements are compared without numbers, which depend on shapes.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from functools import cache
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from qlora_wgpu.gpu.wgsl import shader_source
from qlora_wgpu.graph.launch import Launch
from qlora_wgpu.selfcheck.cases import Case

Statements = frozenset[tuple[str, str]]  # each with its shader's file

_OPERANDS = "operands"  # instead of a file, for accesses to bindings in any shader
_EACH = 4000  # a check's own cost, in characters of code to compile
_COMMENT = re.compile(r"//[^\n]*")
_END = re.compile(r"[;{}\n]")
_NUMBER = re.compile(r"\d+")
_FIELDS = re.compile(r"(\w+: [\w<>]+,?\s*)+")  # of a struct: nothing is executed
# The code that ``gpu/operands.py`` generates for a binding, one line each.
_ACCESSOR = re.compile(
    r"(?:@group\(0\) @binding\(\d+\) var(?:<[^>]*>)? |alias Raw_|fn (?:load|raw|unpack|texel|halves"
    r"|beyond|rounded|broadcast|store|store_small)_)([a-z][a-z0-9_]*?)(?:_\d+)?\b(?=[:(]| =)"
)
# The files with the functions that this code calls.
_STORED_FORMS = ("texel", "eight", "bfloat16", "small_bfloat16", "float16", "eight_float16")


class Footprint(NamedTuple):
    """The statements that launches execute, and the shaders that are compiled for them."""

    statements: Statements  # without numbers
    shaders: Mapping[str, int]  # the length of each shader's code by label

    @classmethod
    def of(cls, launches: Iterable[Launch]) -> Footprint:
        shaders = {launch.shader.label: launch.shader for launch in launches}
        parts = (_statements(shader.path, shader.code) for shader in shaders.values())
        lengths = {label: len(shader.code) for label, shader in shaders.items()}
        return cls(frozenset[tuple[str, str]]().union(*parts), lengths)

    @property
    def paths(self) -> set[str]:
        return {path for path, _ in self.statements} - {_OPERANDS}


@cache
def _statements(path: str, code: str) -> Statements:
    accessors, own = set[str](), list[str]()
    for line in code.splitlines():
        if match := _ACCESSOR.match(line):
            accessors |= _pieces(_named_x(line, match[1]))
        else:
            own.append(line)
    shared = _of_stored_forms()
    return frozenset((path, s) for s in _pieces("\n".join(own)) - shared) | {
        (_OPERANDS, s) for s in accessors
    }


@cache
def _named_x(line: str, name: str) -> str:
    """An access to a binding, without its name and numbers."""
    return re.sub(rf"(\b|_){name}(?=\b|_before\b)", r"\1x", _NUMBER.sub("#", line))


@cache
def _of_stored_forms() -> frozenset[str]:
    """The statements for reading and writing bfloat16, float16 and texels in all shaders."""
    return frozenset().union(
        *(_pieces(shader_source(f"common/{name}.wgsl")) for name in _STORED_FORMS)
    )


def _pieces(code: str) -> frozenset[str]:
    pieces = {piece.strip() for piece in _END.split(_COMMENT.sub("", code))}
    return frozenset(piece for piece in map(_executed, pieces) if piece)


@cache
def _executed(piece: str) -> str:
    """A statement without numbers; empty if nothing is executed."""
    return "" if _FIELDS.fullmatch(piece) else _NUMBER.sub("#", piece)


def covering(
    missing: Statements, traced: Mapping[Case, Footprint], compiled: Container[str] = ()
) -> tuple[list[Case], Statements]:
    """Chooses checks that execute the missing statements, as far as any check does.

    Greedy: the next check executes the most of them relative to the cost of compiling its shaders,
    without those that the run compiles anyway; redundant checks are left out.
    """
    costs = {
        case: _EACH + sum(n for label, n in own.shaders.items() if label not in compiled)
        for case, own in traced.items()
    }
    wanted, chosen, cases = missing, list[Case](), list(traced)

    def gain(case: Case) -> float:
        return len(traced[case].statements & missing) / costs[case]

    # Gains only decrease, so an entry that is still the largest when it is updated is the best.
    heap = [(-gain(case), index) for index, case in enumerate(cases)]
    heapify(heap)
    while missing and heap and heap[0][0]:
        best = cases[heap[0][1]]
        if (updated := -gain(best)) > heap[0][0]:
            heapreplace(heap, (updated, heap[0][1]))
            continue
        heappop(heap)
        chosen.append(best)
        missing -= traced[best].statements
    for case in sorted(chosen, key=lambda case: -costs[case]):
        others = (traced[other].statements for other in chosen if other is not case)
        if not (wanted - missing).difference(*others) & traced[case].statements:
            chosen.remove(case)
    return chosen, missing
