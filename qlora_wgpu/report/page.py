"""The report of a run: figures, curves, texts and settings on one page, and its curve as PNG."""

from __future__ import annotations

import importlib
import io
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from qlora_wgpu.checkpoint import write_file
from qlora_wgpu.report.charts import Line, chart, smoothed, smoothing_length, wants_log
from qlora_wgpu.visible import visible


def _shown(value: object) -> object:
    """A value for the page, where marks for the direction of writing have no power either."""
    return value if isinstance(value, Markup) else visible(str(value))


_TEMPLATES = Environment(
    loader=PackageLoader("qlora_wgpu.report", "."),
    autoescape=True,
    finalize=_shown,
    undefined=StrictUndefined,
    keep_trailing_newline=True,
)


_ANSWERS = {
    "rewards/margins": "margin of rewards",
    "rewards/accuracies": "rewards the right way round",
    "kl": "KL divergence",
    "log_odds_chosen": "log odds ratio",
}
_REFRESHED = 10  # seconds, while a run goes on
_GIVEN_UP = 180  # minutes without a new page, after which nobody writes one any more
_SHOWN = 2**20 / 20  # bytes of a kind that are more than 0.0 MiB


@dataclass(frozen=True)
class TextSample:
    """One text that the model continues."""

    prompt: str  # the text to continue
    expected: str  # how the data goes on
    before: str  # the model's continuation before the first step
    after: str = ""  # the model's continuation in the end; empty while there is none
    between: Sequence[tuple[int, str]] = ()  # steps, and the model's continuation after each


@dataclass(frozen=True)
class Facts:
    """The facts that a page tells besides its curves."""

    title: str  # the model and the data
    subtitle: str  # device and versions
    figures: Mapping[str, str]  # short values by their names
    samples: Sequence[TextSample] = ()  # texts before and after
    memory: Mapping[str, int] = field(default_factory=dict)  # bytes on the device by kind
    config: str = ""  # the run's YAML
    command: str = ""  # how the run was begun
    began: str = ""  # when
    state: str = ""  # where it is: that it goes on, or how it ended
    warnings: Sequence[str] = ()  # what the run has told
    # Whether the page will not change any more; else a browser reads it again, and stays where the
    # reader was
    is_finished: bool = True


def write_report(path: Path, facts: Facts, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes the page, whole or not at all."""
    write_file(path, page(facts, rows).encode())


def page(facts: Facts, rows: Sequence[Mapping[str, Any]]) -> str:
    """The page as text."""
    memory = [
        (kind, f"{nbytes / 2**20:,.1f}")
        for kind, nbytes in sorted(facts.memory.items(), key=lambda item: -item[1])
        if nbytes >= _SHOWN
    ]
    template = _TEMPLATES.get_template("page.html.jinja")
    drawn = [Markup(svg) for svg in _charts(rows) if svg]  # escaped where it was drawn
    refresh = 0 if facts.is_finished else _REFRESHED
    return template.render(
        facts=facts, charts=drawn, memory=memory, refresh=refresh, written=int(time.time()),
        given_up=_GIVEN_UP,
    )  # fmt: skip


def inline(rows: Sequence[Mapping[str, Any]], head: str = "") -> str:
    """The curves as a piece of HTML, for a notebook; its style touches nothing else there."""
    drawn = [Markup(svg) for svg in _charts(rows) if svg]
    return _TEMPLATES.get_template("inline.html.jinja").render(charts=drawn, head=head)


def _charts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        chart("loss", _losses(rows), "{:.4g}".format, may_be_log=True),
        *_answer_charts(rows),
        chart("token accuracy", _hits(rows), "{:.1%}".format),
        _chart(rows, "aux_loss", "balance of experts", "{:.4g}".format),
        _chart(rows, "learning_rate", "learning rate", _rate),
        _chart(rows, "grad_norm", "gradient norm", "{:.3g}".format, may_be_log=True),
        _chart(rows, "tokens_per_second", "tokens per second", "{:,.0f}".format),
    ]


def _answer_charts(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Rewards of good and bad answers, how far apart they are, and what else TRL shows."""
    rewards = [
        Line(name, style, points(rows, f"rewards/{name}"))
        for name, style in (("chosen", "main"), ("rejected", "faint"))
    ]
    yield chart("rewards", rewards, "{:.3g}".format)
    for key, title in _ANSWERS.items():
        lines = [
            Line("training", "main", points(rows, key)),
            Line("held-out", "dots", points(rows, f"eval_{key}")),
        ]
        yield chart(title, lines, "{:.3g}".format)


def _losses(rows: Sequence[Mapping[str, Any]]) -> list[Line]:
    """The loss as it is, its mean over it, and the held-out loss."""
    loss, held_out = points(rows, "loss"), points(rows, "eval_loss")
    raw, length = Line("as logged", "faint", loss), smoothing_length(len(loss))
    dots = Line("held-out", "dots", held_out)
    if length == 1:
        return [replace(raw, style="main"), dots]
    is_log = wants_log([value for _, value in [*loss, *held_out]])
    name = f"EMA {'of logarithms ' if is_log else ''}over about {length} points"
    return [raw, Line(name, "main", smoothed(loss, in_logarithms=is_log)), dots]


def _hits(rows: Sequence[Mapping[str, Any]]) -> list[Line]:
    """The share of labels that are predicted: its mean, as of the loss, and the held-out one."""
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
    """(step, value) of the rows that have a value."""
    return [(row["step"], row[key]) for row in rows if row.get(key) is not None]


def write_png(path: Path, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Writes the curve; False where matplotlib is not installed."""
    # It tells of a home folder that cannot be written, which is none of the run's business.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    try:
        figure_type = importlib.import_module("matplotlib.figure").Figure
    except ImportError:
        return False
    figure = figure_type(figsize=(8, 4), dpi=150, layout="constrained")
    axes = figure.subplots()
    loss, held_out = points(rows, "loss"), points(rows, "eval_loss")
    if loss:
        axes.plot(*zip(*loss, strict=True), color="#0a6", alpha=0.3, linewidth=1)
        axes.plot(*zip(*smoothed(loss), strict=True), color="#0a6", label="training, smoothed")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", color="#d63", label="held-out")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a token)")
    axes.grid(alpha=0.3)
    if loss or held_out:
        axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_file(path, picture.getvalue())
    return True
