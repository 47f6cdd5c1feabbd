"""report.html: figures, curves, texts and settings of a run, self-contained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from qlora_wgpu.checkpoint import write_file
from qlora_wgpu.report.charts import Line, chart, smoothed
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


@dataclass(frozen=True)
class Facts:
    """The facts that a page tells besides its curves.

    Attributes:
        title: The model and the data.
        subtitle: Device and versions.
        figures: Short values by their names.
        texts: Longer texts by their names, such as what was generated.
        memory: Bytes on the device by kind.
        config: The run's YAML.
    """

    title: str
    subtitle: str
    figures: Mapping[str, str]
    texts: Mapping[str, str] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    config: str = ""


def write_report(path: Path, facts: Facts, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes the page.

    Args:
        path: report.html.
        facts: What the page tells besides its curves.
        rows: The rows of metrics.jsonl.

    Raises:
        CheckpointError: If it cannot be written.
    """
    write_file(path, page(facts, rows).encode())


def page(facts: Facts, rows: Sequence[Mapping[str, Any]]) -> str:
    """The page as text."""
    loss = points(rows, "loss")
    charts = [
        chart(
            "loss",
            [
                Line("each step", "faint", loss),
                Line("smoothed", "main", smoothed(loss)),
                Line("held-out", "dots", points(rows, "eval_loss")),
            ],
        ),
        chart("learning rate", [Line("", "main", points(rows, "learning_rate"))], "{:.1e}".format),
        chart("gradient norm", [Line("", "main", points(rows, "grad_norm"))]),
        chart(
            "tokens per second",
            [Line("", "main", points(rows, "tokens_per_second"))],
            "{:,.0f}".format,
        ),
    ]
    memory = [
        (kind, f"{nbytes / 2**20:,.1f}")
        for kind, nbytes in sorted(facts.memory.items(), key=lambda item: -item[1])
        if nbytes
    ]
    template = _TEMPLATES.get_template("page.html.jinja")
    drawn = [Markup(svg) for svg in charts if svg]  # escaped where it was drawn
    return template.render(facts=facts, charts=drawn, memory=memory)


def points(rows: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    """(step, value) of the rows that have a value."""
    return [(row["step"], row[key]) for row in rows if row.get(key) is not None]
