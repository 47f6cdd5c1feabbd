"""Which checks a run needs: those that execute every statement that its own shaders hold.

Shapes decide some numbers of a shader, and how often a line is unrolled: numbers do not count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache

from qlora_wgpu.graph.launch import Launch
from qlora_wgpu.selfcheck.cases import Case

Statements = frozenset[tuple[str, str]]  # each with its shader's file

_COMMENT = re.compile(r"//[^\n]*")
_END = re.compile(r"[;{}\n]")
_NUMBER = re.compile(r"\d+")
_FIELDS = re.compile(r"(\w+: [\w<>]+,?\s*)+")  # of a struct: nothing is executed


def statements(launches: Iterable[Launch]) -> Statements:
    """All statements that these launches execute."""
    shaders = {launch.shader.label: launch.shader for launch in launches}
    parts = (_statements(shader.path, shader.code) for shader in shaders.values())
    return frozenset().union(*parts)


@cache
def _statements(path: str, code: str) -> Statements:
    pieces = {piece.strip() for piece in _END.split(_COMMENT.sub("", code))}
    executed = (_executed(piece) for piece in pieces)
    return frozenset((path, piece) for piece in executed if piece)


@cache
def _executed(piece: str) -> str:
    """A statement without its numbers; empty if nothing is executed."""
    return "" if _FIELDS.fullmatch(piece) else _NUMBER.sub("#", piece)


def covering(
    needed: Statements, traced: Mapping[Case, Statements]
) -> tuple[list[Case], Statements]:
    """Chooses checks for what is needed.

    Args:
        needed: A run's statements.
        traced: What each check executes.

    Returns:
        Every check that the run's shaders pass through as they are, and few others for the rest;
        and what no check executes.
    """
    files = {path for path, _ in needed}
    chosen = [case for case, own in traced.items() if _is_alike(own - needed, files)]
    chosen += fewest(needed.difference(*(traced[case] for case in chosen)), traced)
    return chosen, needed.difference(*(traced[case] for case in chosen))


def _is_alike(foreign: Statements, files: set[str]) -> bool:
    """Whether what a check executes beyond a run is no more than one file that the run lacks."""
    others = {path for path, _ in foreign}
    return len(others) <= 1 and not others & files


def fewest(missing: Statements, traced: Mapping[Case, Statements]) -> list[Case]:
    """Few checks that execute what is missing, as far as any does."""
    chosen: list[Case] = []
    while missing:
        best = max(traced, key=lambda case: _gain(traced[case], missing))
        if not traced[best] & missing:
            break
        chosen.append(best)
        missing -= traced[best]
    return chosen


def _gain(own: Statements, missing: Statements) -> tuple[int, int]:
    """Statements that are missing count; among equals, those that nobody asked for cost."""
    common = len(own & missing)
    return common, -len(own)
