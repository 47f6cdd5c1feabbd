"""PEFT's rank_pattern and alpha_pattern: values for modules whose names end as a pattern says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

Number = TypeVar("Number", int, int | float)


def value_for(patterns: Mapping[str, Number], module: str, default: Number) -> Number:
    """The value of the first pattern that fits a module, or the default.

    Args:
        patterns: Regular expressions, each for a whole name or for its last parts; one that begins
            with ``^`` for the whole name only.
        module: A module's full name.
        default: The value where no pattern fits.
    """
    for pattern, value in patterns.items():
        whole = pattern if pattern.startswith("^") else rf"(.*\.)?({pattern})"
        if re.fullmatch(whole.removeprefix("^").removesuffix("$"), module):
            return value
    return default
