"""Untrusted regular expressions in Python's syntax.

PEFT's patterns need Python's syntax, such as lookahead, which engines without backtracking lack. So
expressions that may backtrack for long run in a child process.
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
    """An expression is invalid or takes too long; the message is a predicate of it."""


@lru_cache(maxsize=1)
def _process() -> SandboxProcess:
    return SandboxProcess("sandbox.expressions")


def check_expression(expression: str) -> None:
    """Requires a valid regular expression."""
    check_expressions((expression,))


@lru_cache(maxsize=1024)
def check_expressions(expressions: tuple[str, ...]) -> None:
    """Requires valid regular expressions, and not too many."""
    if len(expressions) > PATTERNS:
        raise ExpressionError(f"are {len(expressions):,} patterns, more than {PATTERNS:,}")
    if sum(map(len, expressions)) > PATTERN_CHARACTERS:
        raise ExpressionError(f"has more than {PATTERN_CHARACTERS:,} characters")
    slow = [each for each in expressions if not _is_quick(each)]
    quick = [each for each in expressions if _is_quick(each)]
    problems = _problems(quick) + (_in_child(_problems, slow) if slow else [])
    for expression, problem in zip(quick + slow, problems, strict=True):
        if problem is not None:
            which = "is not" if len(expressions) == 1 else f"has {expression[:80]!r}, which is not"
            raise ExpressionError(f"{which} a regular expression: {problem}")


@lru_cache(maxsize=2**16)
def fits(expression: str, text: str) -> bool:
    """Whether ``re.fullmatch`` matches."""
    check_expression(expression)
    if _is_quick(expression, text):
        return _fits(expression, text)
    return bool(_in_child(_fits, expression, text))


@lru_cache(maxsize=2**16)
def first_fitting(expressions: tuple[str, ...], text: str) -> int | None:
    """The index of the first expression that ``re.fullmatch`` matches; None if none does.

    All that may backtrack are sent to the child process in one call with a common time limit.
    """
    slow: list[int] = []
    found = None
    for index, expression in enumerate(expressions):
        if not _is_quick(expression, text):
            slow.append(index)
        elif _fits(expression, text):
            found = index
            break
    if slow:
        check_expressions(tuple(expressions[index] for index in slow))
        earlier = _in_child(_first_fitting, [expressions[index] for index in slow], text)
        found = found if earlier is None else slow[earlier]
    return found


@lru_cache(maxsize=2**16)
def begins(expression: str, text: str) -> bool:
    """Whether ``re.match`` matches."""
    check_expression(expression)
    if _is_quick(expression, text):
        return _begins(expression, text)
    return bool(_in_child(_begins, expression, text))


def _is_quick(expression: str, text: str = "") -> bool:
    """Whether it has at most one repetition, or a few alternatives without any.

    PEFT's prefix that matches any parent module does not count.
    """
    own = expression.removeprefix(ANY_PARENT)
    repeats, choices = len(_REPEATS.findall(own)), own.count("|")
    is_short = len(expression) <= 1000 and len(text) <= 1000
    return is_short and ((repeats == 0 and choices < 8) or (repeats == 1 and choices == 0))


def _in_child(function: Callable[..., Any], *args: str | list[str]) -> Any:
    try:
        return _process().call(function, *args)
    except SandboxError as err:
        raise ExpressionError(str(err)) from None


# ---- functions of this process and of the child --------------------------------------------------


def _problems(expressions: list[str]) -> list[str | None]:
    problems: list[str | None] = []
    for expression in expressions:
        try:
            re.compile(expression)
            problems.append(None)
        except (re.error, RecursionError, OverflowError) as err:
            problems.append(str(err))
    return problems


_compiled = lru_cache(maxsize=4 * PATTERNS)(re.compile)  # re's own cache is small


def _fits(expression: str, text: str) -> bool:
    return _compiled(expression).fullmatch(text) is not None


def _first_fitting(expressions: list[str], text: str) -> int | None:
    return next((n for n, each in enumerate(expressions) if _fits(each, text)), None)


def _begins(expression: str, text: str) -> bool:
    return _compiled(expression).match(text) is not None
