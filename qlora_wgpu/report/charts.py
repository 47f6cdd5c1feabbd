"""Line charts as SVG, drawn by hand: a page with them needs no script and no network."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 640, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 30
_TICKS = 5
_LONGEST_MEAN = 20  # points that a smoothed line is about the mean of


@dataclass(frozen=True)
class Line:
    """Points of a chart.

    Attributes:
        name: For the legend and for tooltips.
        style: A CSS class: "main", "faint" or "dots".
        points: (step, value), steps rising.
    """

    name: str
    style: str
    points: Sequence[tuple[float, float]]


def smoothed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """An exponential mean, without the bias of its start; shorter where there are few points."""
    keep = 1 - 1 / min(max(len(points) / 10, 1.0), _LONGEST_MEAN)
    means, mean, weight = [], 0.0, 0.0
    for step, value in points:
        mean = keep * mean + (1 - keep) * value
        weight = keep * weight + (1 - keep)
        means.append((step, mean / weight))
    return means


def ticks(low: float, high: float) -> list[float]:
    """Round numbers from about low to about high."""
    step = 10 ** math.floor(math.log10(max(high - low, 1e-12) / _TICKS))
    for factor in (1, 2, 5, 10):
        if (high - low) / (factor * step) <= _TICKS:
            step *= factor
            break
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def chart(title: str, lines: Sequence[Line], show: Callable[[float], str] = "{:g}".format) -> str:
    """An SVG figure; nothing where there is no point."""
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    x0, x1 = min(xs), max(max(xs), min(xs) + 1)
    margin = 0.05 * (max(ys) - min(ys)) or 0.05 * abs(max(ys)) or 1.0
    y0, y1 = min(ys) - margin, max(ys) + margin

    def at(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + (x - x0) / (x1 - x0) * (_WIDTH - _LEFT - _RIGHT)
        down = _TOP + (y1 - y) / (y1 - y0) * (_HEIGHT - _TOP - _BOTTOM)
        return round(across, 1), round(down, 1)

    parts = [_grid(at, (x0, x1), (y0, y1), show), *(_line(line, at, show) for line in lines)]
    legend = " ".join(
        f'<span class="{line.style}">{escape(line.name)}</span>' for line in lines if line.name
    )
    return (
        f"<figure><figcaption>{escape(title)} <small>{legend}</small></figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg></figure>"
    )


_At = Callable[[float, float], tuple[float, float]]


def _grid(
    at: _At, xs: tuple[float, float], ys: tuple[float, float], show: Callable[[float], str]
) -> str:
    parts = []
    for y in ticks(*ys):
        _, down = at(xs[0], y)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{down}" y2="{down}"/>'
            f'<text x="{_LEFT - 6}" y="{down + 4}" text-anchor="end">{escape(show(y))}</text>'
        )
    for x in ticks(*xs):
        across, _ = at(x, ys[0])
        parts.append(f'<text x="{across}" y="{_HEIGHT - 8}" text-anchor="middle">{x:g}</text>')
    return "".join(parts)


def _line(line: Line, at: _At, show: Callable[[float], str]) -> str:
    placed = [at(x, y) for x, y in line.points]
    path = " ".join(f"{across},{down}" for across, down in placed)
    parts = [f'<polyline class="{line.style}" points="{path}"/>']
    if line.style == "dots" or len(placed) == 1:
        for (x, y), (across, down) in zip(line.points, placed, strict=True):
            title = escape(f"{line.name} {show(y)} at step {x:g}")
            parts.append(
                f'<circle class="{line.style}" cx="{across}" cy="{down}" r="3.5">'
                f"<title>{title}</title></circle>"
            )
    return "".join(parts)
