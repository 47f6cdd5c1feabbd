"""``watch``: a run in another process, or one that has ended, in this terminal."""

from __future__ import annotations

import time

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from qlora_wgpu.cli._terminal import Terminal
from qlora_wgpu.report.page import MARK, Points, dots, points, smoothed
from qlora_wgpu.runs.reporting import RunStatus
from qlora_wgpu.training.observers import Row

_HEIGHT, _WIDEST = 10, 100  # characters of a drawing
_PROMPT, _ANSWER, _BAR = 100, 300, 60
_STYLES = ("green", "yellow")


@click.command()
@click.argument("run", type=click.Path())
@click.option("--once", is_flag=True, help="Show it once, instead of following it.")
@click.option(
    "--every", default=2.0, type=click.FloatRange(min=0.2), help="Seconds between updates."
)
def watch(run: str, once: bool, every: float) -> None:
    """Show a run's progress, curves and texts, from the folder that another process writes.

    RUN is its folder, such as runs/first. It is followed until it ends, or until Ctrl-C, which
    does not stop the run. Without a terminal it is shown once.
    """
    console = Terminal()
    view = RunStatus(run)
    if once or not console.is_terminal:
        console.print(shown(view, min(console.width, _WIDEST)))
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            width = min(console.width, _WIDEST)
            live.update(shown(view, width), refresh=True)
            if view.is_running is False:
                return
            time.sleep(every)
            view = RunStatus(run)


def shown(view: RunStatus, width: int) -> RenderableType:
    """A run for a terminal of so many columns."""
    parts: list[RenderableType] = [_head(view), _figures(view)]
    loss = smoothed(points(view.steps, "loss"))
    parts += _drawing("loss", loss, points(view.evaluations, "eval_loss"), width)
    hits = smoothed(points(view.steps, "mean_token_accuracy"))
    held_out = points(view.evaluations, "eval_mean_token_accuracy")
    parts += _drawing("token accuracy", hits, held_out, width)
    parts += _texts(view)
    return Group(*parts)


def _head(view: RunStatus) -> RenderableType:
    of = f" of {view.total_steps:,}" if view.total_steps else ""
    line = Text(f"{view.path}  step {view.step:,}{of}  {view.state}", style="bold")
    if not view.total_steps:
        return line
    done = min(view.step * _BAR // view.total_steps, _BAR)
    return Group(line, Text("━" * done, style=_STYLES[0]) + Text("━" * (_BAR - done), style="dim"))


def _figures(view: RunStatus) -> RenderableType:
    """The latest row of each kind."""
    row = view.steps[-1] if view.steps else {}
    figures = [
        _figure(row, "loss", "loss {:.4f}"),
        _figure(row, "mean_token_accuracy", "acc {:.1%}"),
        _figure(row, "grad_norm", "grad norm {:.3f}"),
        _figure(row, "learning_rate", "lr {:.2e}"),
        _figure(row, "tokens_per_second", "{:,.0f} tok/s"),
    ]
    text = "  ".join(filter(None, figures))
    if view.evaluations:
        latest = view.evaluations[-1]
        loss = _figure(latest, "eval_loss", "held-out loss {:.4f}")
        hits = _figure(latest, "eval_mean_token_accuracy", "acc {:.1%}")
        text += f"\n{loss}  {hits}  after step {latest['step']:,}"
    return Text(text)


def _figure(row: Row, key: str, form: str) -> str:
    value = row.get(key)
    return "" if value is None else form.format(value)


def _drawing(title: str, trained: Points, held_out: Points, width: int) -> list[RenderableType]:
    made = dots(trained, held_out, max(width - 10, 10), _HEIGHT)
    if made is None:
        return []
    rows, up = made
    marks = {round((_HEIGHT - 1) * (1 - up.share(value))): value for value in up.ticks()}
    drawn = Text(f"\n{title}", style="bold")
    drawn.append(f"  {MARK} held-out" if held_out else "", style=f"{_STYLES[1]} not bold")
    for number, row in enumerate(rows):
        mark = marks.get(number)
        drawn.append(f"\n{'' if mark is None else f'{mark:.4g}':>8}  ", style="dim")
        for index, part in enumerate(row.split(MARK)):
            drawn.append(MARK if index else "", style=_STYLES[1])
            drawn.append(part, style=_STYLES[0])
    return [drawn]


def _texts(view: RunStatus) -> list[RenderableType]:
    shown_rows = view.latest_samples
    if not shown_rows:
        return []
    text = Text(f"\ntexts after step {shown_rows[0]['step']:,}", style="bold")
    for row in shown_rows:
        prompt, said = (" ".join(str(row.get(key, "")).split()) for key in ("prompt", "text"))
        text.append(f"\n  {prompt[-_PROMPT:]}", style="dim not bold")
        text.append(f"\n    {said[:_ANSWER] or '(nothing)'}", style="not bold")
    return [text]
