"""Line charts as SVG, drawn by hand: a page with them needs no script and no network.

The lines are stretched to whatever room there is; texts lie beside them as HTML, so that they are
as large on a phone as on a wide screen. Over the lines lie invisible bands, one for each step or
several, of which the one under the pointer shows its values.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from qlora_wgpu.report.axes import Axis
from qlora_wgpu.report.curves import Points, thinned

_SIZE = 1000  # units of the drawing, either way
_MOST_BANDS = 160
_Show = Callable[[float], str]


@dataclass(frozen=True)
class Line:
    """Points of a chart.

    Attributes:
        name: For the legend and for the values under the pointer.
        style: A CSS class: "main", "faint" or "dots".
        points: (step, value), steps rising.
    """

    name: str
    style: str
    points: Points


def chart(
    title: str,
    lines: Sequence[Line],
    show: _Show = "{:g}".format,
    *,
    may_be_log: bool = False,
) -> str:
    """A figure; nothing where there is no point.

    Args:
        title: Above it.
        lines: The lines, of which those without points are left out.
        show: Writes a value.
        may_be_log: Whether values that span several sizes get a logarithmic axis.
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
