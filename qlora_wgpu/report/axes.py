"""Axes of a chart: the range that is shown, where a value lies in it, round numbers along it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_TICKS = 5
_WORTH_A_LOGARITHM = 5.0  # the largest value over the smallest


@dataclass(frozen=True)
class Axis:
    """A range of values along a side of a chart.

    Attributes:
        low: The least value that is shown.
        high: The largest.
        is_log: Whether equal ratios are equal distances, instead of equal differences.
        only: The one value there is, if so: nothing else is marked.
    """

    low: float
    high: float
    is_log: bool = False
    only: float | None = None

    @classmethod
    def of_values(cls, values: Sequence[float], *, may_be_log: bool = False) -> Axis:
        """An axis with a small margin around values."""
        low, high = min(values), max(values)
        if may_be_log and wants_log(values):
            margin = (high / low) ** 0.04
            return cls(low / margin, high * margin, is_log=True)
        if low == high:
            margin = 0.05 * abs(high) or 1.0
            return cls(low - margin, high + margin, only=low)
        margin = 0.05 * (high - low)
        return cls(low - margin, high + margin)

    def share(self, value: float) -> float:
        """Where a value lies: 0 at the low end, 1 at the high one."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Round numbers within, or the one value."""
        if self.only is not None:
            return [self.only]
        return log_ticks(self.low, self.high) if self.is_log else ticks(self.low, self.high)


def wants_log(values: Sequence[float]) -> bool:
    """Whether values span so much that a logarithmic axis shows them better."""
    return min(values) > 0 and max(values) / min(values) >= _WORTH_A_LOGARITHM


def ticks(low: float, high: float) -> list[float]:
    """Round numbers from about low to about high, at equal distances."""
    step = 10 ** math.floor(math.log10(max(high - low, 1e-12) / _TICKS))
    for factor in (1, 2, 5, 10):
        if (high - low) / (factor * step) <= _TICKS:
            step *= factor
            break
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers from low to high, at about equal ratios."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        marks = [digit * 10.0**e for e in exponents for digit in digits]
        marks = [mark for mark in marks if low <= mark <= high]
        if len(marks) <= _TICKS + 2:
            return marks
    return marks[:: math.ceil(len(marks) / _TICKS)]
