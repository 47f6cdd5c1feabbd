"""Points of a curve: smoothed without a bias, and thinned without losing what stands out."""

from __future__ import annotations

import math
from collections.abc import Sequence

Points = Sequence[tuple[float, float]]
_LONGEST_MEAN = 20  # points that a smoothed line is about the mean of
_MOST_DRAWN = 800  # points of a line; a screen shows no more


def smoothing_length(count: int) -> int:
    """Of about how many points a smoothed line of so many is the mean."""
    return round(min(max(count / 10, 1.0), _LONGEST_MEAN))


def smoothed(points: Points, *, in_logarithms: bool = False) -> list[tuple[float, float]]:
    """An exponential mean, without the bias of its start; shorter where there are few points.

    Args:
        points: (step, value), steps rising.
        in_logarithms: Whether it is the geometric mean, which is the mean on a logarithmic axis.
    """
    keep = 1 - 1 / smoothing_length(len(points))
    means, mean, weight = [], 0.0, 0.0
    for step, value in points:
        mean = keep * mean + (1 - keep) * (math.log(value) if in_logarithms else value)
        weight = keep * weight + (1 - keep)
        means.append((step, math.exp(mean / weight) if in_logarithms else mean / weight))
    return means


def thinned(points: Points) -> list[tuple[float, float]]:
    """At most some hundred points: of each stretch its lowest and its highest, in their order."""
    if len(points) <= _MOST_DRAWN:
        return list(points)
    size = -(-2 * len(points) // _MOST_DRAWN)
    kept: list[tuple[float, float]] = []
    for first in range(0, len(points), size):
        stretch = points[first : first + size]
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept
