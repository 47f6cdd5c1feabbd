"""report.html: figures, curves, texts and settings of a run, self-contained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from qlora_wgpu.report.charts import Line, chart, smoothed

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #6a737d; --paper: #fff; --edge: #e1e4e8;
  --main: #0a6; --dots: #d63; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --soft: #9aa4ae; --paper: #14171a;
  --edge: #2d333b; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1320px; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; }
p.sub, small, figcaption small { color: var(--soft); }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: .7rem;
  margin: 1.2rem 0; }
.facts div { border: 1px solid var(--edge); border-radius: 8px; padding: .6rem .8rem; }
.facts b { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 520px), 1fr));
  gap: 1rem; }
figure { margin: 0; border: 1px solid var(--edge); border-radius: 8px; padding: .7rem; }
figcaption { font-weight: 600; } figcaption span { font-weight: 400; margin-left: .8em; }
figcaption span::before { content: "\\25cf "; } span.main::before { color: var(--main); }
span.faint::before { color: var(--main); opacity: .3; } span.dots::before { color: var(--dots); }
svg { width: 100%; height: auto; } svg text { font-size: 11px; fill: var(--soft); }
.grid { stroke: var(--edge); } polyline { fill: none; stroke-width: 2; stroke-linejoin: round; }
polyline.main { stroke: var(--main); } polyline.faint { stroke: var(--main); opacity: .3;
  stroke-width: 1; } polyline.dots { stroke: var(--dots); } circle.dots { fill: var(--dots); }
circle.main, circle.faint { fill: var(--main); }
pre, td { white-space: pre-wrap; overflow-wrap: anywhere; }
pre { border: 1px solid var(--edge); border-radius: 8px; padding: .8rem; font-size: 13px; }
table { border-collapse: collapse; width: 100%; } td { vertical-align: top; padding: .4rem .8rem;
  border-top: 1px solid var(--edge); } td:first-child { color: var(--soft); white-space: nowrap; }
"""


@dataclass(frozen=True)
class Facts:
    """What a page tells besides its curves.

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
        facts: What it tells.
        rows: Those of metrics.jsonl.
    """
    path.write_text(page(facts, rows), encoding="utf-8")


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
    figures = "".join(
        f"<div><small>{escape(name)}</small><b>{escape(value)}</b></div>"
        for name, value in facts.figures.items()
    )
    texts = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>"
        for name, text in facts.texts.items()
    )
    memory = "".join(
        f"<tr><td>{escape(kind)}</td><td>{nbytes / 2**20:,.1f} MiB</td></tr>"
        for kind, nbytes in sorted(facts.memory.items(), key=lambda item: -item[1])
        if nbytes
    )
    parts = [
        f"<h1>{escape(facts.title)}</h1><p class='sub'>{escape(facts.subtitle)}</p>",
        f"<div class='facts'>{figures}</div>",
        f"<div class='charts'>{''.join(charts)}</div>",
        f"<h2>Texts</h2><table>{texts}</table>" if texts else "",
        f"<h2>Device memory</h2><table>{memory}</table>" if memory else "",
        f"<h2>Configuration</h2><pre>{escape(facts.config)}</pre>" if facts.config else "",
    ]
    head = (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(facts.title)}</title><style>{_STYLE}</style></head>"
    )
    return f"{head}<body>{''.join(parts)}</body></html>\n"


def points(rows: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    """(step, value) of the rows that have a value."""
    return [(row["step"], row[key]) for row in rows if row.get(key) is not None]
