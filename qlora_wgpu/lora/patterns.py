"""PEFT's rank_pattern and alpha_pattern: values for modules whose names end as a pattern says."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from typing import TypeVar

from qlora_wgpu.errors import ConfigError
from qlora_wgpu.sandbox.expressions import ANY_PARENT, ExpressionError, first_fitting, fits

Number = TypeVar("Number", int, int | float)


def value_for(patterns: Mapping[str, Number], module: str, default: Number) -> Number:
    """The value of the first pattern that fits a module, or the default.

    Args:
        patterns: Regular expressions, each for a whole name or for its last parts; one that begins
            with ``^`` for the whole name only.
        module: A module's full name.
        default: The value where no pattern fits.

    Raises:
        ConfigError: If a pattern takes too long.
    """
    if not patterns:
        return default
    try:
        place = first_fitting(tuple(map(_below, patterns)), module)
    except ExpressionError as err:
        names = ", ".join(repr(pattern[:80]) for pattern in islice(patterns, 2))
        more = " and more" if len(patterns) > 2 else ""
        raise ConfigError(f"the pattern {names}{more} for names of modules {err}") from err
    return default if place is None else list(patterns.values())[place]


def unfitting(patterns: Iterable[str], modules: Collection[str]) -> list[str]:
    """The patterns that fit none of some modules.

    Raises:
        ConfigError: If a pattern takes too long.
    """
    return [p for p in patterns if not any(_fits(p, module) for module in modules)]


def _below(pattern: str) -> str:
    """The expression for a pattern with any parent before it, which ^ lets none stand."""
    return rf"{ANY_PARENT}({pattern})"


def _fits(pattern: str, module: str) -> bool:
    try:
        return fits(_below(pattern), module)
    except ExpressionError as err:
        raise ConfigError(f"the pattern {pattern[:80]!r} for names of modules {err}") from err
