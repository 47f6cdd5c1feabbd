"""Regular expressions of strangers, as Python reads them.

PEFT's patterns need Python's syntax, looking ahead included, which no engine without searching back
has. So an expression that may search back for long runs in a process of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from qlora_wgpu.limits import PATTERN_CHARACTERS
from qlora_wgpu.sandbox.process import ChildProcess, Stopped

ANY_PARENT = r"(.*\.)?"
_REPEATS = re.compile(r"[*+?{]")


class ExpressionError(ValueError):
    """An expression is broken, or takes too long; the message says what it does or is."""


@lru_cache(maxsize=1)
def _process() -> ChildProcess:
    return ChildProcess("expressions")


@lru_cache(maxsize=1024)
def check_expression(expression: str) -> None:
    """Makes sure that a regular expression is one.

    Raises:
        ExpressionError: If it is not, or is too long.
    """
    if len(expression) > PATTERN_CHARACTERS:
        raise ExpressionError(f"has more than {PATTERN_CHARACTERS:,} characters")
    problem: str | None = (
        _problem(expression) if _is_quick(expression) else _apart(_problem, expression)
    )
    if problem is not None:
        raise ExpressionError(f"is not a regular expression: {problem}")


@lru_cache(maxsize=2**16)
def fits(expression: str, text: str) -> bool:
    """Whether a whole text fits a regular expression, as ``re.fullmatch`` has it.

    Raises:
        ExpressionError: If the expression is broken, or takes too long.
    """
    check_expression(expression)
    if _is_quick(expression, text):
        return _fits(expression, text)
    return bool(_apart(_fits, expression, text))


@lru_cache(maxsize=2**16)
def begins(expression: str, text: str) -> bool:
    """Whether a text begins with what fits a regular expression, as ``re.match`` has it.

    Raises:
        ExpressionError: If the expression is broken, or takes too long.
    """
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


def _apart(function: Callable[..., Any], *args: str) -> Any:
    try:
        return _process().call(function, *args)
    except Stopped as err:
        raise ExpressionError(str(err)) from None


# --- what follows runs in the child process, too


def _problem(expression: str) -> str | None:
    try:
        re.compile(expression)
    except (re.error, RecursionError, OverflowError) as err:
        return str(err)
    return None


def _fits(expression: str, text: str) -> bool:
    return re.fullmatch(expression, text) is not None


def _begins(expression: str, text: str) -> bool:
    return re.match(expression, text) is not None
