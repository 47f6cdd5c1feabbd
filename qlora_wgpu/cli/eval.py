"""``eval``: the held-out loss of the base, and of an adapter."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.cli._model import open_adapted
from qlora_wgpu.cli._preparing import check_ids, prepare_data
from qlora_wgpu.config import Config, load_config
from qlora_wgpu.data import Dataset, Tokenizer
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.training.batching import in_order, padded_batch


@click.command("eval")
@click.argument("config", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--adapter", help="Folder of a PEFT adapter; that of the run by default.")
@click.option("--data", "data_path", help="Other data than data.eval.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def evaluate(
    config: str,
    overrides: tuple[str, ...],
    adapter: str | None,
    data_path: str | None,
    as_json: bool,
) -> None:
    """Measure loss and perplexity on held-out data: the base against an adapter.

    CONFIG is a run's YAML; its data.eval is measured on, and the adapter in its output.dir.
    """
    settings = load_config(config, overrides)
    path = data_path or settings.data.eval
    if path is None:
        raise ConfigError("data.eval is not set: name held-out data there or with --data")
    if adapter is None and (Path(settings.output.dir) / "adapter").is_dir():
        adapter = str(Path(settings.output.dir) / "adapter")
    console = Console(stderr=as_json)
    folder = ModelFolder.open(settings.model.path)
    data = prepare_data(console, settings.data, path, Tokenizer.from_folder(folder.path))
    model = open_adapted(
        console,
        settings.model.path,
        adapter,
        settings.quant.scheme,
        settings.train.compute_dtype,
        settings.device.adapter,
    )
    check_ids(path, data, model.architecture.vocab_size)
    found: dict[str, Any] = {}
    with console.status("measuring the base"), model.adapter_off():
        found["base"] = _measure(model, data, settings)
    if adapter is not None:
        with console.status("measuring the adapter"):
            found["adapter"] = _measure(model, data, settings)
    if as_json:
        sys.stdout.write(json.dumps({"data": path, "adapter_path": adapter, **found}) + "\n")
        return
    table = Table(box=None)
    for name in ("", "loss", "perplexity", "tokens"):
        table.add_column(name, justify="right" if name else "left")
    for name, row in found.items():
        table.add_row(name, f"{row['loss']:.4f}", f"{row['perplexity']:,.2f}", f"{row['tokens']:,}")
    console.print(table, highlight=False)


def _measure(model: QLoRAModel, data: Dataset, settings: Config) -> dict[str, float]:
    size = settings.train.per_device_train_batch_size
    longest = max(settings.data.max_seq_length, data.longest)

    def batches() -> Iterator[tuple[Any, Any, Any]]:
        for chunk in in_order(data, size):
            batch = padded_batch(chunk, size, longest)
            yield batch.input_ids, batch.labels, batch.attention_mask

    total, count = model.summed_loss(batches())
    loss = total / count
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "tokens": count}
