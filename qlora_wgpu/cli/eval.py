"""``eval``: the held-out loss of the base, and of an adapter."""

from __future__ import annotations

from typing import Any

import click
from rich.table import Table

from qlora_wgpu import runs
from qlora_wgpu.cli._display import Display
from qlora_wgpu.cli._settings import renamed_keys_told
from qlora_wgpu.cli._terminal import Terminal, write_json


@click.command("eval")
@click.argument("config", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--adapter", help="Folder of a PEFT adapter; by default the one the run has written.")
@click.option("--data", "data_path", help="Held-out data to measure on instead of data.eval.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def evaluate(
    config: str,
    overrides: tuple[str, ...],
    adapter: str | None,
    data_path: str | None,
    as_json: bool,
) -> None:
    """Measure loss and perplexity on held-out data: the base against an adapter.

    CONFIG is a run's YAML or its folder, such as runs/first; its held-out data (data.eval or
    data.eval_split) is measured on, and the adapter in its output.dir.
    An adapter in the folder of its run is opened as the run's config.yaml says it was trained;
    overrides hold whatever it says.
    """
    console = Terminal(stderr=as_json)
    with renamed_keys_told(), Display(console) as display:
        result = runs.evaluate(
            config, display, adapter=adapter, data=data_path, overrides=overrides
        )
    losses = {"base": result.base}
    if result.adapter is not None:
        losses["adapter"] = result.adapter
    if as_json:
        figures: dict[str, Any] = {"data": result.data, "adapter_path": result.adapter_path}
        for name, row in losses.items():
            figures[name] = {
                "loss": row.loss,
                "perplexity": row.perplexity,
                "mean_token_accuracy": row.token_accuracy,
                "tokens": row.tokens,
            }
        write_json(figures)
        return
    table = Table(box=None)
    for name in ("", "loss", "perplexity", "token accuracy", "tokens"):
        table.add_column(name, justify="right" if name else "left")
    for name, row in losses.items():
        share = f"{row.token_accuracy:.1%}"
        table.add_row(name, f"{row.loss:.4f}", f"{row.perplexity:,.2f}", share, f"{row.tokens:,}")
    console.print(table, highlight=False)
