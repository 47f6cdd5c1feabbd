"""report.html: a run's curves and samples as one self-contained page."""

from __future__ import annotations

import importlib
import io
import logging
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from qlora_wgpu.checkpoint import write_file
from qlora_wgpu.visible import visible

# ---- axes ----------------------------------------------------------------------------------------

_TICKS = 5
_LOG_RATIO = 5.0  # of the largest value to the smallest, from which an axis is logarithmic


@dataclass(frozen=True)
class Axis:
    """A range of values along a side of a chart."""

    low: float  # minimum of the axis
    high: float  # maximum of the axis
    is_log: bool = False  # whether equal ratios are equal distances, instead of equal differences
    only: float | None = None  # if all values are equal, that value, which is the only tick

    @classmethod
    def of_values(cls, values: Sequence[float], *, may_be_log: bool = False) -> Axis:
        """An axis around values, with a small margin."""
        low, high = min(values), max(values)
        if may_be_log and suits_log(values):
            margin = (high / low) ** 0.04
            return cls(low / margin, high * margin, is_log=True)
        if low == high:
            margin = 0.05 * abs(high) or 1.0
            return cls(low - margin, high + margin, only=low)
        margin = 0.05 * (high - low)
        return cls(low - margin, high + margin)

    def share(self, value: float) -> float:
        """The position of a value, from 0 at the low end to 1 at the high end."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Round numbers on the axis, or the only value."""
        if self.only is not None:
            return [self.only]
        return log_ticks(self.low, self.high) if self.is_log else ticks(self.low, self.high)


def suits_log(values: Sequence[float]) -> bool:
    """Whether values span enough for a logarithmic axis."""
    return min(values) > 0 and max(values) / min(values) >= _LOG_RATIO


def ticks(low: float, high: float) -> list[float]:
    """Equally spaced round numbers from about low to about high."""
    step = 10 ** math.floor(math.log10(max(high - low, 1e-12) / _TICKS))
    for factor in (1, 2, 5, 10):
        if (high - low) / (factor * step) <= _TICKS:
            step *= factor
            break
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers from low to high, spaced by about equal ratios."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        marks = [digit * 10.0**e for e in exponents for digit in digits]
        marks = [mark for mark in marks if low <= mark <= high]
        if len(marks) <= _TICKS + 2:
            return marks
    return marks[:: math.ceil(len(marks) / _TICKS)]


# ---- points --------------------------------------------------------------------------------------

Points = Sequence[tuple[float, float]]
_MAX_SMOOTHING = 20  # points that a smoothed line averages over
_MAX_POINTS = 800  # of a line; a screen shows no more


def smoothing_length(count: int) -> int:
    """Over about how many points a line of ``count`` points is smoothed."""
    return round(min(max(count / 10, 1.0), _MAX_SMOOTHING))


def smoothed(points: Points, *, in_logarithms: bool = False) -> list[tuple[float, float]]:
    """An exponential moving average with bias correction, over fewer points for short lines.

    In logarithms it is a geometric mean, as fits a logarithmic axis.
    """
    keep = 1 - 1 / smoothing_length(len(points))
    means, mean, weight = [], 0.0, 0.0
    for step, value in points:
        mean = keep * mean + (1 - keep) * (math.log(value) if in_logarithms else value)
        weight = keep * weight + (1 - keep)
        means.append((step, math.exp(mean / weight) if in_logarithms else mean / weight))
    return means


def thinned(points: Points) -> list[tuple[float, float]]:
    """At most ``_MAX_POINTS`` points: the minimum and maximum of each interval, in order."""
    if len(points) <= _MAX_POINTS:
        return list(points)
    size = -(-2 * len(points) // _MAX_POINTS)
    kept: list[tuple[float, float]] = []
    for first in range(0, len(points), size):
        stretch = points[first : first + size]
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept


# ---- SVG -----------------------------------------------------------------------------------------

_SIZE = 1000  # units of the drawing, in both directions
_MAX_BANDS = 160
_Show = Callable[[float], str]


@dataclass(frozen=True)
class Line:
    """A line of a chart."""

    name: str  # for the legend and the tooltip
    style: str  # a CSS class: "main", "faint" or "dots"
    points: Points  # (step, value), by step


def chart(
    title: str,
    lines: Sequence[Line],
    show: _Show = "{:g}".format,
    *,
    may_be_log: bool = False,
) -> str:
    """A chart as HTML; empty without points.

    The lines are SVG that scales with the page. Labels are HTML, so that they have the same size on
    a phone and on a wide screen. Invisible bands over the lines, one for each step or several, show
    a tooltip with the values.
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
    marks = [x for x in across.ticks() if math.isclose(x, round(x))]  # steps are integers
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
    # A line of length 0 has round ends: a dot that stays round when the SVG is stretched.
    dots = "".join(f'<polyline class="dot {line.style}" points="{at} {at}"/>' for at in placed)
    return path + dots


def _bands(lines: Sequence[Line], across: Axis, show: _Show) -> str:
    """A band for each step with a value, or for every few steps if there are many."""
    steps = sorted({x for line in lines for x, _ in line.points})
    steps = steps[:: -(-len(steps) // _MAX_BANDS)]
    edges = [(a + b) / 2 for a, b in pairwise(steps)]
    widths = [b - a for a, b in zip([across.low, *edges], [*edges, across.high], strict=True)]
    return "".join(
        f'<span style="flex-grow:{max(width, 1e-9):.6g}"><b>{_values(lines, step, show)}</b></span>'
        for step, width in zip(steps, widths, strict=True)
    )


def _values(lines: Sequence[Line], step: float, show: _Show) -> str:
    """A tooltip: the step, and each line's latest value up to it."""
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
    """A curve and marks in Braille characters: rows from the top, and the axis; None if empty."""
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
    """All dots on the straight lines between places."""
    for x, y in places[:1]:
        yield round(x), round(y)
    for (x0, y0), (x1, y1) in pairwise(places):
        count = max(1, round(max(abs(x1 - x0), abs(y1 - y0))))
        for i in range(1, count + 1):
            yield round(x0 + (x1 - x0) * i / count), round(y0 + (y1 - y0) * i / count)


def _shown(value: object) -> object:
    """A value for the page, with control characters and direction marks escaped."""
    return value if isinstance(value, Markup) else visible(str(value))


_TEMPLATES = Environment(
    loader=PackageLoader("qlora_wgpu.report", "."),
    autoescape=True,
    finalize=_shown,
    undefined=StrictUndefined,
    keep_trailing_newline=True,
)


_METRICS = {
    "rewards/margins": "reward margin",
    "rewards/accuracies": "reward accuracy",
    "kl": "KL divergence",
    "log_odds_chosen": "log odds ratio",
    "margin": "reward margin",
    "mean_reward": "mean reward",
    "accuracy": "accuracy",
    "macro_f1": "macro F1",
    "mae": "mean absolute error",
}
_REFRESH_SECONDS = 10  # between reloads of the page during a run
_GIVE_UP_MINUTES = 180  # age of the page from which it is not reloaded any more
_MIN_SHOWN = 2**20 / 20  # bytes of a kind that are not shown as 0.0 MiB


@dataclass(frozen=True)
class TextSample:
    """A prompt, and what the model generates for it."""

    prompt: str
    expected: str  # the data's completion
    before: str  # generated before the first step
    after: str = ""  # generated after training; empty until then
    between: Sequence[tuple[int, str]] = ()  # steps, and the text generated after each
    pictures: Sequence[str] = ()  # the prompt's images as ``data:`` URIs


@dataclass(frozen=True)
class Facts:
    """What a page shows in addition to its curves."""

    title: str  # the model and the data
    subtitle: str  # device and versions
    values: Mapping[str, str]  # short texts by name
    samples: Sequence[TextSample] = ()
    memory: Mapping[str, int] = field(default_factory=dict)  # bytes on the device by kind
    config: str = ""  # the run's YAML
    command: str = ""  # that started the run
    began: str = ""  # when it started
    state: str = ""  # whether the run continues, or how it ended
    warnings: Sequence[str] = ()
    is_finished: bool = True  # whether the page is final; else the browser reloads it


def write_report(path: Path, facts: Facts, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes the page, atomically."""
    write_file(path, page(facts, rows).encode())


def page(facts: Facts, rows: Sequence[Mapping[str, Any]]) -> str:
    """The page as HTML."""
    memory = [
        (kind, f"{nbytes / 2**20:,.1f}")
        for kind, nbytes in sorted(facts.memory.items(), key=lambda item: -item[1])
        if nbytes >= _MIN_SHOWN
    ]
    template = _TEMPLATES.get_template("page.html.jinja")
    drawn = [Markup(svg) for svg in _charts(rows) if svg]  # escaped by chart
    refresh = 0 if facts.is_finished else _REFRESH_SECONDS
    measured = (row["eval_confusion"] for row in reversed(rows) if "eval_confusion" in row)
    return template.render(
        facts=facts, charts=drawn, confusion=next(measured, {}), memory=memory, refresh=refresh,
        written=int(time.time()), give_up_minutes=_GIVE_UP_MINUTES,
    )  # fmt: skip


@dataclass(frozen=True)
class DataSample:
    """A training example for a page."""

    title: str
    parts: Sequence[tuple[str, bool]]  # its text, and whether the loss is taken on it
    images: Sequence[tuple[str, str]] = ()  # a ``data:`` URI, or nothing, and a caption of each


def write_samples(path: Path, title: str, samples: Sequence[DataSample], about: str) -> None:
    """Writes a page of examples, and a text about their data set, atomically."""
    template = _TEMPLATES.get_template("samples.html.jinja")
    write_file(path, template.render(title=title, samples=samples, about=about).encode())


def inline(rows: Sequence[Mapping[str, Any]], head: str = "") -> str:
    """The curves as an HTML fragment for a notebook, with scoped styles."""
    drawn = [Markup(svg) for svg in _charts(rows) if svg]
    return _TEMPLATES.get_template("inline.html.jinja").render(charts=drawn, head=head)


def _charts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        *_reward_charts(rows),
        chart("loss", _losses(rows), "{:.4g}".format, may_be_log=True),
        *_preference_charts(rows),
        chart("token accuracy", _accuracy(rows), "{:.1%}".format),
        _chart(rows, "aux_loss", "load-balancing loss", "{:.4g}".format),
        _chart(rows, "learning_rate", "learning rate", _rate),
        _chart(rows, "grad_norm", "gradient norm", "{:.3g}".format, may_be_log=True),
        _chart(rows, "tokens_per_second", "tokens per second", "{:,.0f}".format),
    ]


def _preference_charts(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Rewards of chosen and rejected answers, and other metrics of answers and sequences."""
    rewards = [
        Line(name, style, points(rows, f"rewards/{name}"))
        for name, style in (("chosen", "main"), ("rejected", "faint"))
    ]
    yield chart("rewards", rewards, "{:.3g}".format)
    for key, title in _METRICS.items():
        lines = [
            Line("training", "main", points(rows, key)),
            Line("held-out", "dots", points(rows, f"eval_{key}")),
        ]
        yield chart(title, lines, "{:.3g}".format)


def _reward_charts(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The mean reward and length of sampled completions."""
    for key, title in (("reward", "mean reward"), ("completions/mean_length", "mean length")):
        trained = points(rows, key)
        lines = [
            Line("as logged", "faint", trained),
            Line("training", "main", smoothed(trained)),
            Line("held-out", "dots", points(rows, f"eval_{key}")),
        ]
        yield chart(title, lines, "{:.3g}".format)


def _losses(rows: Sequence[Mapping[str, Any]]) -> list[Line]:
    """The loss as logged and smoothed, and the held-out loss."""
    loss, held_out = points(rows, "loss"), points(rows, "eval_loss")
    if points(rows, "reward"):  # the held-out loss is the negative reward
        held_out = []
    raw, length = Line("as logged", "faint", loss), smoothing_length(len(loss))
    dots = Line("held-out", "dots", held_out)
    if length == 1:
        return [replace(raw, style="main"), dots]
    is_log = suits_log([value for _, value in [*loss, *held_out]])
    name = f"EMA {'of logarithms ' if is_log else ''}over about {length} points"
    return [raw, Line(name, "main", smoothed(loss, in_logarithms=is_log)), dots]


def _accuracy(rows: Sequence[Mapping[str, Any]]) -> list[Line]:
    trained = points(rows, "mean_token_accuracy")
    dots = Line("held-out", "dots", points(rows, "eval_mean_token_accuracy"))
    return [Line("training", "main", smoothed(trained)), dots]


def _rate(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def _chart(
    rows: Sequence[Mapping[str, Any]],
    key: str,
    title: str,
    show: Callable[[float], str],
    *,
    may_be_log: bool = False,
) -> str:
    return chart(title, [Line("", "main", points(rows, key))], show, may_be_log=may_be_log)


def points(rows: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    """(step, value) of the rows that have one."""
    return [(row["step"], row[key]) for row in rows if row.get(key) is not None]


def write_png(path: Path, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Writes the loss curve; False if matplotlib is not installed."""
    # It warns if the home folder is not writable, which does not matter here.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    try:
        figure_type = importlib.import_module("matplotlib.figure").Figure
    except ImportError:
        return False
    figure = figure_type(figsize=(8, 4), dpi=150)
    # Fixed margins: matplotlib would draw everything twice to find them.
    axes = figure.add_axes((0.1, 0.13, 0.87, 0.83))
    key = "reward" if points(rows, "reward") else "loss"
    loss, held_out = points(rows, key), points(rows, f"eval_{key}")
    if loss:
        axes.plot(*zip(*loss, strict=True), color="#0a6", alpha=0.3, linewidth=1)
        axes.plot(*zip(*smoothed(loss), strict=True), color="#0a6", label="training, smoothed")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", color="#d63", label="held-out")
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward" if key == "reward" else "loss (nats per token)")
    axes.grid(alpha=0.3)
    if loss or held_out:
        axes.legend()
    png = io.BytesIO()
    figure.savefig(png, format="png")
    write_file(path, png.getvalue())
    return True
