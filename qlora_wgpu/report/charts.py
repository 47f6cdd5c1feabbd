"""Line charts as SVG or text, drawn by hand: no script and no network."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

# ---- axes ----------------------------------------------------------------------------------------

_TICKS = 5
_WORTH_A_LOGARITHM = 5.0  # the largest value over the smallest


@dataclass(frozen=True)
class Axis:
    """A range of values along a side of a chart."""

    low: float  # the least value that is shown
    high: float  # the largest
    is_log: bool = False  # whether equal ratios are equal distances, instead of equal differences
    only: float | None = None  # the one value there is, if so: nothing else is marked

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


# ---- points --------------------------------------------------------------------------------------

Points = Sequence[tuple[float, float]]
_LONGEST_MEAN = 20  # points that a smoothed line is about the mean of
_MOST_DRAWN = 800  # points of a line; a screen shows no more


def smoothing_length(count: int) -> int:
    """Of about how many points a smoothed line of so many is the mean."""
    return round(min(max(count / 10, 1.0), _LONGEST_MEAN))


def smoothed(points: Points, *, in_logarithms: bool = False) -> list[tuple[float, float]]:
    """An exponential mean, without the bias of its start; shorter where there are few points.

    In logarithms it is the geometric mean, which is the mean on a logarithmic axis.
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


# ---- SVG -----------------------------------------------------------------------------------------

_SIZE = 1000  # units of the drawing, either way
_MOST_BANDS = 160
_Show = Callable[[float], str]


@dataclass(frozen=True)
class Line:
    """Points of a chart."""

    name: str  # for the legend and for the values under the pointer
    style: str  # a CSS class: "main", "faint" or "dots"
    points: Points  # (step, value), steps rising


def chart(
    title: str,
    lines: Sequence[Line],
    show: _Show = "{:g}".format,
    *,
    may_be_log: bool = False,
) -> str:
    """A figure; nothing where there is no point.

    The lines are stretched to whatever room there is; texts lie beside them as HTML, so that they
    are as large on a phone as on a wide screen. Over the lines lie invisible bands, one for each
    step or several, of which the one under the pointer shows its values.
    """
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    steps = [x for line in lines for x, _ in line.points]
    across = Axis(min(steps), max(max(steps), min(steps) + 1))
    up = Axis.of_values([y for line in lines for _, y in line.points], may_be_log=may_be_log)
    title = f"{title} (logarithmic)" if up.is_log else title
    legend = "".join(
        f'<span class="{line.style}">{escape(line.name)}</span>' for line in lines if line.name
    )
    drawn = "".join(_drawn(line, across, up) for line in lines)
    return (
        f"<figure><figcaption>{escape(title)} <small>{legend}</small></figcaption>"
        f'<div class="plot">{_labels(across, up, show)}'
        f'<svg viewBox="0 0 {_SIZE} {_SIZE}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(title)}">{_grid(up)}{drawn}</svg>'
        f'<div class="bands">{_bands(lines, across, show)}</div></div></figure>'
    )


def _grid(up: Axis) -> str:
    heights = [_SIZE * (1 - up.share(y)) for y in up.ticks()]
    return "".join(
        f'<line class="grid" x1="0" x2="{_SIZE}" y1="{y:.1f}" y2="{y:.1f}"/>' for y in heights
    )


def _labels(across: Axis, up: Axis, show: _Show) -> str:
    values = "".join(
        f'<i class="y" style="bottom:{100 * up.share(y):.2f}%">{escape(show(y))}</i>'
        for y in up.ticks()
    )
    marks = [x for x in across.ticks() if math.isclose(x, round(x))]  # steps are whole
    return values + "".join(
        f'<i class="x{" odd" if index % 2 else ""}" style="left:{100 * across.share(x):.2f}%">'
        f"{x:g}</i>"
        for index, x in enumerate(marks)
    )


def _drawn(line: Line, across: Axis, up: Axis) -> str:
    placed = [
        f"{_SIZE * across.share(x):.1f},{_SIZE * (1 - up.share(y)):.1f}"
        for x, y in thinned(line.points)
    ]
    path = f'<polyline class="{line.style}" points="{" ".join(placed)}"/>'
    if line.style != "dots" and len(placed) > 1:
        return path
    # A line without a length has round ends: a dot that stretching leaves round.
    dots = "".join(f'<polyline class="dot {line.style}" points="{at} {at}"/>' for at in placed)
    return path + dots


def _bands(lines: Sequence[Line], across: Axis, show: _Show) -> str:
    """A band for each step that has a value; where there are many, for every few of them."""
    steps = sorted({x for line in lines for x, _ in line.points})
    steps = steps[:: -(-len(steps) // _MOST_BANDS)]
    edges = [(a + b) / 2 for a, b in pairwise(steps)]
    widths = [b - a for a, b in zip([across.low, *edges], [*edges, across.high], strict=True)]
    return "".join(
        f'<span style="flex-grow:{max(width, 1e-9):.6g}"><b>{_values(lines, step, show)}</b></span>'
        for step, width in zip(steps, widths, strict=True)
    )


def _values(lines: Sequence[Line], step: float, show: _Show) -> str:
    """The step, and each line's latest value up to it."""
    parts = [f"step {step:g}"]
    for line in lines:
        index = bisect_right(line.points, step, key=lambda point: point[0]) - 1
        if index >= 0:
            at, value = line.points[index]
            when = "" if at == step else f" (step {at:g})"
            parts.append(f"{line.name} {show(value)}{when}".strip())
    return escape(" · ".join(parts))


# ---- text ----------------------------------------------------------------------------------------

MARK = "●"
_BLANK = 0x2800
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # by column, from the top


def dots(
    curve: Points, marks: Points, width: int, height: int, *, may_be_log: bool = True
) -> tuple[list[str], Axis] | None:
    """A curve in characters, and single marks over the same steps: rows from the top, and the axis.

    None where there is no point.
    """
    points = [*curve, *marks]
    if not points:
        return None
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    up = Axis.of_values([y for _, y in points], may_be_log=may_be_log)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (2 * width - 1) * (x - first) / max(last - first, 1)
        return across, (4 * height - 1) * (1 - up.share(y))

    cells = [[0] * width for _ in range(height)]
    for column, row in _joined([place(x, y) for x, y in curve]):
        cells[row // 4][column // 2] |= _DOTS[column % 2][row % 4]
    rows = [[chr(_BLANK + bits) for bits in row] for row in cells]
    for x, y in marks:
        across, down = place(x, y)
        rows[round(down) // 4][round(across) // 2] = MARK
    return ["".join(row) for row in rows], up


def _joined(places: Sequence[tuple[float, float]]) -> Iterator[tuple[int, int]]:
    """All dots from one place to the next, along straight lines."""
    for x, y in places[:1]:
        yield round(x), round(y)
    for (x0, y0), (x1, y1) in pairwise(places):
        count = max(1, round(max(abs(x1 - x0), abs(y1 - y0))))
        for i in range(1, count + 1):
            yield round(x0 + (x1 - x0) * i / count), round(y0 + (y1 - y0) * i / count)
