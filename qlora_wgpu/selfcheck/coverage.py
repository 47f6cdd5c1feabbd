"""Which checks a run needs: few that execute every statement of the run's shaders.

Statements are compared without their numbers, which depend on shapes.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from functools import cache
from typing import NamedTuple

from qlora_wgpu.gpu.wgsl import shader_source
from qlora_wgpu.graph.launch import Launch
from qlora_wgpu.selfcheck.cases import Case

Statements = frozenset[tuple[str, str]]  # each with its shader's file

_OPERANDS = "operands"  # in place of a file, of how bindings are read and written by any shader
_EACH = 4000  # characters of code, in whose time a check computes and compares
_COMMENT = re.compile(r"//[^\n]*")
_END = re.compile(r"[;{}\n]")
_NUMBER = re.compile(r"\d+")
_FIELDS = re.compile(r"(\w+: [\w<>]+,?\s*)+")  # of a struct: nothing is executed
# What ``gpu/operands.py`` writes for a binding, each on one line.
_ACCESSOR = re.compile(
    r"(?:@group\(0\) @binding\(\d+\) var(?:<[^>]*>)? |alias Raw_|fn (?:load|raw|unpack|texel|halves"
    r"|beyond|rounded|broadcast|store|store_small)_)([a-z][a-z0-9_]*?)(?:_\d+)?\b(?=[:(]| =)"
)
# Whose functions those call.
_STORED_FORMS = ("texel", "eight", "bfloat16", "small_bfloat16", "float16", "eight_float16")


class Footprint(NamedTuple):
    """The statements that launches execute, and the shaders that a driver compiles for them."""

    statements: Statements  # all statements, without their numbers
    shaders: Mapping[str, int]  # the length of each shader's code, by its label

    @classmethod
    def of(cls, launches: Iterable[Launch]) -> Footprint:
        """That of some launches."""
        shaders = {launch.shader.label: launch.shader for launch in launches}
        parts = (_statements(shader.path, shader.code) for shader in shaders.values())
        lengths = {label: len(shader.code) for label, shader in shaders.items()}
        return cls(frozenset[tuple[str, str]]().union(*parts), lengths)

    @property
    def paths(self) -> set[str]:
        """The shaders' files."""
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
    """How a binding is read or written, without its name and numbers."""
    return re.sub(rf"(\b|_){name}(?=\b|_before\b)", r"\1x", _NUMBER.sub("#", line))


@cache
def _of_stored_forms() -> frozenset[str]:
    """The statements by which every shader reads and writes bfloat16, float16 and texels."""
    return frozenset().union(
        *(_pieces(shader_source(f"common/{name}.wgsl")) for name in _STORED_FORMS)
    )


def _pieces(code: str) -> frozenset[str]:
    pieces = {piece.strip() for piece in _END.split(_COMMENT.sub("", code))}
    return frozenset(piece for piece in map(_executed, pieces) if piece)


@cache
def _executed(piece: str) -> str:
    """A statement without its numbers; empty if nothing is executed."""
    return "" if _FIELDS.fullmatch(piece) else _NUMBER.sub("#", piece)


def covering(
    missing: Statements, traced: Mapping[Case, Footprint], compiled: Container[str] = ()
) -> tuple[list[Case], Statements]:
    """Chooses checks that execute what is missing, as far as any does.

    The next is always the one that executes most of it for what its shaders take to compile, where
    those that the run compiles as well cost nothing; what others make superfluous is left out.
    """
    costs = {
        case: _EACH + sum(n for label, n in own.shaders.items() if label not in compiled)
        for case, own in traced.items()
    }
    wanted, chosen = missing, list[Case]()
    while missing and traced:
        best = max(traced, key=lambda case: len(traced[case].statements & missing) / costs[case])
        if not traced[best].statements & missing:
            break
        chosen.append(best)
        missing -= traced[best].statements
    for case in sorted(chosen, key=lambda case: -costs[case]):
        others = (traced[other].statements for other in chosen if other is not case)
        if not (wanted - missing).difference(*others) & traced[case].statements:
            chosen.remove(case)
    return chosen, missing
