"""Regular expressions of strangers, as Python reads them.

PEFT's patterns need Python's syntax, looking ahead included, which no engine without searching back
has. So an expression that may search back for long runs in a process of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from qlora_wgpu.limits import PATTERN_CHARACTERS, PATTERNS
from qlora_wgpu.sandbox.process import SandboxError, SandboxProcess

ANY_PARENT = r"(.*\.)?"
_REPEATS = re.compile(r"[*+?{]")


class ExpressionError(ValueError):
    """An expression is broken, or takes too long; the message says what it does or is."""


@lru_cache(maxsize=1)
def _process() -> SandboxProcess:
    return SandboxProcess("sandbox.expressions")


def check_expression(expression: str) -> None:
    """Makes sure that a regular expression is one."""
    check_expressions((expression,))


@lru_cache(maxsize=1024)
def check_expressions(expressions: tuple[str, ...]) -> None:
    """Makes sure that regular expressions are such, and not too many."""
    if len(expressions) > PATTERNS:
        raise ExpressionError(f"are {len(expressions):,} patterns, more than {PATTERNS:,}")
    if sum(map(len, expressions)) > PATTERN_CHARACTERS:
        raise ExpressionError(f"has more than {PATTERN_CHARACTERS:,} characters")
    searching = [each for each in expressions if not _is_quick(each)]
    quick = [each for each in expressions if _is_quick(each)]
    problems = _problems(quick) + (_apart(_problems, searching) if searching else [])
    for expression, problem in zip(quick + searching, problems, strict=True):
        if problem is not None:
            which = "is not" if len(expressions) == 1 else f"has {expression[:80]!r}, which is not"
            raise ExpressionError(f"{which} a regular expression: {problem}")


@lru_cache(maxsize=2**16)
def fits(expression: str, text: str) -> bool:
    """Whether a whole text fits a regular expression, as ``re.fullmatch`` has it."""
    check_expression(expression)
    if _is_quick(expression, text):
        return _fits(expression, text)
    return bool(_apart(_fits, expression, text))


@lru_cache(maxsize=2**16)
def first_fitting(expressions: tuple[str, ...], text: str) -> int | None:
    """The place of the first expression that a whole text fits; None where none does.

    All that may search back are asked of the other process at once: what they cost together is
    bounded as one is.
    """
    searching: list[int] = []
    found = None
    for place, expression in enumerate(expressions):
        if not _is_quick(expression, text):
            searching.append(place)
        elif _fits(expression, text):
            found = place
            break
    if searching:
        check_expressions(tuple(expressions[place] for place in searching))
        place = _apart(_first_fitting, [expressions[place] for place in searching], text)
        found = found if place is None else searching[place]
    return found


@lru_cache(maxsize=2**16)
def begins(expression: str, text: str) -> bool:
    """Whether a text begins with what fits a regular expression, as ``re.match`` has it."""
    check_expression(expression)
    if _is_quick(expression, text):
        return _begins(expression, text)
    return bool(_apart(_begins, expression, text))


def _is_quick(expression: str, text: str = "") -> bool:
    """Whether it repeats one thing at most, or chooses a few times without repeating.

    That PEFT lets anything stand before a name, up to a dot, makes it no worse.
    """
    own = expression.removeprefix(ANY_PARENT)
    repeats, choices = len(_REPEATS.findall(own)), own.count("|")
    is_short = len(expression) <= 1000 and len(text) <= 1000
    return is_short and ((repeats == 0 and choices < 8) or (repeats == 1 and choices == 0))


def _apart(function: Callable[..., Any], *args: str | list[str]) -> Any:
    try:
        return _process().call(function, *args)
    except SandboxError as err:
        raise ExpressionError(str(err)) from None


# ---- what runs in the child process, too ---------------------------------------------------------


def _problem(expression: str) -> str | None:
    try:
        re.compile(expression)
    except (re.error, RecursionError, OverflowError) as err:
        return str(err)
    return None


def _problems(expressions: list[str]) -> list[str | None]:
    return [_problem(each) for each in expressions]


_compiled = lru_cache(maxsize=4 * PATTERNS)(re.compile)  # re itself keeps few


def _fits(expression: str, text: str) -> bool:
    return _compiled(expression).fullmatch(text) is not None


def _first_fitting(expressions: list[str], text: str) -> int | None:
    return next((n for n, each in enumerate(expressions) if _fits(each, text)), None)


def _begins(expression: str, text: str) -> bool:
    return _compiled(expression).match(text) is not None
