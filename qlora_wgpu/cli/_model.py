"""What several verbs share: opening a model with a bar for its tensors, and its adapter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.config import LoraConfig, QuantConfig
from qlora_wgpu.families.family import find_family
from qlora_wgpu.lora import load_adapter
from qlora_wgpu.lora.targets import lora_config
from qlora_wgpu.model.qlora_model import QLoRAModel


def open_model(console: Console, path: str, **options: Any) -> QLoRAModel:
    """Loads a model, showing how far its weights are; options as for ``from_pretrained``."""
    architecture = find_family(ModelFolder.open(path).config).read(ModelFolder.open(path).config)
    total = len(architecture.linears) + len(architecture.experts) + (1 if architecture.tied else 2)
    columns = (
        TextColumn("loading weights"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("loading", total=total)
        model = QLoRAModel.from_pretrained(
            path, progress=lambda name: progress.advance(task), **options
        )
    return model


def open_adapted(
    console: Console, path: str, adapter: str | None, scheme: str, compute_dtype: str, device: str
) -> QLoRAModel:
    """Loads a model with an adapter, or with one that does nothing.

    Args:
        console: Where the bar is shown.
        path: Folder or hub name of the base model.
        adapter: Folder of a PEFT adapter.
        scheme: ``quant.scheme``.
        compute_dtype: ``train.compute_dtype``.
        device: ``device.adapter``.
    """
    lora = LoraConfig(r=1, lora_alpha=1)
    if adapter is not None:
        lora = lora_config(load_adapter(adapter)[1])
    model = open_model(
        console,
        path,
        lora=lora,
        quant=QuantConfig(scheme=scheme),
        compute_dtype=compute_dtype,
        device=device,
    )
    if adapter is not None:
        model.load_adapter(adapter)
    return model


_BASE = (
    click.option(
        "--model", "model_path", required=True, help="Folder or hub name of the base model."
    ),
    click.option("--adapter", help="Folder of a PEFT adapter."),
    click.option(
        "--scheme",
        default="nf4",
        show_default=True,
        type=click.Choice(["nf4", "none"]),
        help="How linear layers are stored: 4 bits a weight, or as they are.",
    ),
    click.option(
        "--compute-dtype",
        default="bfloat16",
        show_default=True,
        type=click.Choice(["bfloat16", "float32"]),
        help="Of matmul operands.",
    ),
    click.option(
        "--device", default="auto", show_default=True, help="GPU adapter, as doctor lists them."
    ),
)
_SAMPLING = (
    click.option(
        "--max-new-tokens",
        default=256,
        show_default=True,
        type=click.IntRange(1),
        help="Most tokens of an answer.",
    ),
    click.option(
        "--temperature",
        default=0.0,
        show_default=True,
        type=click.FloatRange(0),
        help="How freely tokens are chosen; 0 takes the likeliest.",
    ),
    click.option(
        "--top-k",
        default=0,
        show_default=True,
        type=click.IntRange(0),
        help="Choose among so many likeliest tokens; 0 among all.",
    ),
    click.option(
        "--top-p",
        default=1.0,
        show_default=True,
        type=click.FloatRange(0, 1, min_open=True),
        help="Choose among the likeliest tokens that have this probability together.",
    ),
    click.option(
        "--seed", default=0, show_default=True, type=click.IntRange(0), help="Of the choices."
    ),
)


def base_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say which model and adapter."""
    for option in reversed(_BASE):
        command = option(command)
    return command


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say how tokens are chosen."""
    for option in reversed(_SAMPLING):
        command = option(command)
    return command
