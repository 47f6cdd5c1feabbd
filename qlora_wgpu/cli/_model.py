"""Options that several verbs share, and the model that they open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
from rich.console import Console

from qlora_wgpu.cli._display import Display
from qlora_wgpu.config import QuantConfig
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.runs import OpenedModel
from qlora_wgpu.runs.opening import load_adapted


def open_adapted(
    console: Console,
    source: OpenedModel,
    adapter: str | None,
    scheme: str,
    compute_dtype: str,
    gpu: str,
) -> QLoRAModel:
    """Loads a model with an adapter, or with one that does nothing, showing a bar.

    Args:
        console: The console that shows the bar.
        source: The base model.
        adapter: Folder of a PEFT adapter.
        scheme: ``quant.scheme``.
        compute_dtype: ``train.compute_dtype``.
        gpu: ``device.gpu``.
    """
    quant = QuantConfig.model_validate({"scheme": scheme})
    with Display(console) as display:
        return load_adapted(source, adapter, quant, compute_dtype, Device(gpu), display)


def gpu_option(text: str, *old_names: str) -> Callable[..., Any]:
    """``--gpu``, which is still read under the names that the option used to have.

    Args:
        text: The help.
        old_names: Former names, such as ``"--device"``; they are not shown.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for name in old_names:
            command = click.option(
                name, "old_gpu", hidden=True, expose_value=False, callback=_take_old_name
            )(command)
        option = click.option("--gpu", default="auto", show_default=True, is_eager=True, help=text)
        return option(command)

    return decorate


def _take_old_name(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        context.params["gpu"] = value


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
        help="Type of matmul operands; sums are float32 either way.",
    ),
    gpu_option(
        "The GPU to use: its index or a part of its name, as doctor lists them.", "--device"
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
        help="Sample among this many of the likeliest tokens; 0 for all of them.",
    ),
    click.option(
        "--top-p",
        default=1.0,
        show_default=True,
        type=click.FloatRange(0, 1, min_open=True),
        help="Sample among the likeliest tokens that together have this probability.",
    ),
    click.option(
        "--seed",
        default=0,
        show_default=True,
        type=click.IntRange(0),
        help="Seed of the random choice of tokens.",
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
