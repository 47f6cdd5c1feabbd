"""``train``: a YAML file in, a PEFT adapter out."""

from __future__ import annotations

import click
from rich.console import Console
from rich.table import Table

from qlora_wgpu import runs
from qlora_wgpu.cli._display import TrainingDisplay
from qlora_wgpu.cli._settings import read_settings
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.training import TrainResult


@click.command()
@click.argument("config", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--overwrite", is_flag=True, help="Replace a run that output.dir already holds.")
@click.option(
    "--resume",
    is_flag=True,
    help="Go on with the run in output.dir from its newest whole checkpoint, bit by bit as if it "
    "had not stopped; begins one where there is none, and leaves a finished one as it is.",
)
def train(config: str, overrides: tuple[str, ...], overwrite: bool, resume: bool) -> None:
    """Fine-tune a model as CONFIG, a YAML file, says.

    Values of CONFIG can be replaced: `qlora-wgpu train run.yaml optim.learning_rate=1e-4`.
    The run's folder (output.dir) gets adapter/, checkpoints/, config.yaml, metrics.jsonl and
    report.html. Ctrl-C stops it with its state saved.
    """
    console = Console()
    settings = read_settings(config, overrides)
    if overwrite and resume:
        raise ConfigError("--overwrite and --resume exclude each other: choose one")
    with TrainingDisplay(console) as display:
        result = runs.train(settings, display, overwrite=overwrite, resume=resume)
    _show_result(console, result)


def _show_result(console: Console, result: TrainResult) -> None:
    if result.interrupted:
        console.print(
            f"stopped after step {result.steps}; its state is saved: `--resume` goes on",
            style="yellow",
        )
    table = Table(show_header=False, box=None)
    for name, value in _figures(result).items():
        table.add_row(name, value)
    console.print(table, highlight=False, markup=False)
    if result.reports:
        page, *pictures = result.reports
        named = "".join(f" and {picture.name}" for picture in pictures)
        console.print(f"{page}{named} written", highlight=False)


def _figures(result: TrainResult) -> dict[str, str]:
    figures = {}
    if result.eval_loss_before is not None and result.eval_loss is not None:
        losses = f"{result.eval_loss_before:.4f} before, {result.eval_loss:.4f} after"
        figures["held-out loss"] = losses
    if result.best_step is not None and result.best_step != result.steps:
        figures["best"] = f"{result.best_eval_loss:.4f} after step {result.best_step}"
    if result.sample is not None:
        figures |= vars(result.sample)
    figures["trained"] = (
        f"{result.num_tokens:,} tokens in {result.seconds:,.0f} s, device memory at most "
        f"{result.peak_bytes / 2**20:,.1f} MiB"
    )
    figures["adapter"] = str(result.adapter_dir)
    return figures
