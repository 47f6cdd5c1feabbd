"""``watch``: a run in another process, or a finished one, in this terminal."""

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

_PLOT_HEIGHT, _MAX_WIDTH = 10, 100  # characters
_PROMPT_WIDTH, _TEXT_WIDTH, _BAR_WIDTH = 100, 300, 60
_STYLES = ("green", "yellow")


@click.command()
@click.argument("run", type=click.Path())
@click.option("--once", is_flag=True, help="Print the current state and exit.")
@click.option(
    "--every", default=2.0, type=click.FloatRange(min=0.2), help="Seconds between updates."
)
def watch(run: str, once: bool, every: float) -> None:
    """Show the progress of a run in another process.

    RUN is the run's folder, such as runs/first. Shows its state, loss curves and sample texts,
    until the run ends or until Ctrl-C, which does not stop the run. Without a terminal, prints the
    current state and exits.
    """
    console = Terminal()
    view = RunStatus(run)
    if once or not console.is_terminal:
        console.print(shown(view, min(console.width, _MAX_WIDTH)))
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            width = min(console.width, _MAX_WIDTH)
            live.update(shown(view, width), refresh=True)
            if view.is_running is False:
                return
            time.sleep(every)
            view = RunStatus(run)


def shown(view: RunStatus, width: int) -> RenderableType:
    """A run's state, for a terminal of this width."""
    parts: list[RenderableType] = [_head(view), _latest(view)]
    rewards = smoothed(points(view.steps, "reward"))
    if rewards:
        parts += _plot("reward", rewards, points(view.evaluations, "eval_reward"), width)
    else:
        loss = smoothed(points(view.steps, "loss"))
        parts += _plot("loss", loss, points(view.evaluations, "eval_loss"), width)
    hits = smoothed(points(view.steps, "mean_token_accuracy"))
    held_out = points(view.evaluations, "eval_mean_token_accuracy")
    parts += _plot("token accuracy", hits, held_out, width)
    parts += _samples(view)
    return Group(*parts)


def _head(view: RunStatus) -> RenderableType:
    of = f" of {view.total_steps:,}" if view.total_steps else ""
    line = Text(f"{view.path}  step {view.step:,}{of}  {view.state}", style="bold")
    if not view.total_steps:
        return line
    done = min(view.step * _BAR_WIDTH // view.total_steps, _BAR_WIDTH)
    return Group(
        line, Text("━" * done, style=_STYLES[0]) + Text("━" * (_BAR_WIDTH - done), style="dim")
    )


def _latest(view: RunStatus) -> RenderableType:
    """The latest metrics."""
    row = view.steps[-1] if view.steps else {}
    parts = [
        _formatted(row, "reward", "reward {:.4f}"),
        _formatted(row, "loss", "loss {:.4f}"),
        _formatted(row, "mean_token_accuracy", "acc {:.1%}"),
        _formatted(row, "grad_norm", "grad norm {:.3f}"),
        _formatted(row, "learning_rate", "lr {:.2e}"),
        _formatted(row, "tokens_per_second", "{:,.0f} tok/s"),
    ]
    text = "  ".join(filter(None, parts))
    if view.evaluations:
        latest = view.evaluations[-1]
        loss = _formatted(latest, "eval_loss", "held-out loss {:.4f}")
        if latest.get("eval_reward") is not None:
            loss = _formatted(latest, "eval_reward", "held-out reward {:.4f}")
        hits = _formatted(latest, "eval_mean_token_accuracy", "acc {:.1%}")
        text += f"\n{loss}  {hits}  after step {latest['step']:,}"
    return Text(text)


def _formatted(row: Row, key: str, form: str) -> str:
    value = row.get(key)
    return "" if value is None else form.format(value)


def _plot(title: str, trained: Points, held_out: Points, width: int) -> list[RenderableType]:
    made = dots(trained, held_out, max(width - 10, 10), _PLOT_HEIGHT)
    if made is None:
        return []
    rows, up = made
    marks = {round((_PLOT_HEIGHT - 1) * (1 - up.share(value))): value for value in up.ticks()}
    drawn = Text(f"\n{title}", style="bold")
    drawn.append(f"  {MARK} held-out" if held_out else "", style=f"{_STYLES[1]} not bold")
    for number, row in enumerate(rows):
        mark = marks.get(number)
        drawn.append(f"\n{'' if mark is None else f'{mark:.4g}':>8}  ", style="dim")
        for index, part in enumerate(row.split(MARK)):
            drawn.append(MARK if index else "", style=_STYLES[1])
            drawn.append(part, style=_STYLES[0])
    return [drawn]


def _samples(view: RunStatus) -> list[RenderableType]:
    shown_rows = view.latest_samples
    if not shown_rows:
        return []
    text = Text(f"\nsamples after step {shown_rows[0]['step']:,}", style="bold")
    for row in shown_rows:
        prompt, generated = (" ".join(str(row.get(key, "")).split()) for key in ("prompt", "text"))
        text.append(f"\n  {prompt[-_PROMPT_WIDTH:]}", style="dim not bold")
        text.append(f"\n    {generated[:_TEXT_WIDTH] or '(empty)'}", style="not bold")
    return [text]
