"""PEFT's rank_pattern and alpha_pattern: values for modules whose names end as a pattern says."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

from qlora_wgpu.errors import ConfigError
from qlora_wgpu.sandbox.expressions import ANY_PARENT, ExpressionError, fits

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
    for pattern, value in patterns.items():
        if _fits(pattern, module):
            return value
    return default


def unfitting(patterns: Iterable[str], modules: Collection[str]) -> list[str]:
    """The patterns that fit none of some modules.

    Raises:
        ConfigError: If a pattern takes too long.
    """
    return [p for p in patterns if not any(_fits(p, module) for module in modules)]


def _fits(pattern: str, module: str) -> bool:
    try:
        return fits(rf"{ANY_PARENT}({pattern})", module)  # ^ lets no parent stand before it
    except ExpressionError as err:
        raise ConfigError(f"the pattern {pattern[:80]!r} for names of modules {err}") from err
