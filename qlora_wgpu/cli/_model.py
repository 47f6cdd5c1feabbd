"""Options that several verbs share, and the model that they open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import click
from rich.console import Console

from qlora_wgpu.cli._display import Display
from qlora_wgpu.cli._settings import read_settings
from qlora_wgpu.cli._sizes import read_bytes
from qlora_wgpu.config import Config, ModelConfig
from qlora_wgpu.config.as_trained import Changes, changed, without_none
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.generation import QLoRAModel
from qlora_wgpu.runs import OpenedModel
from qlora_wgpu.runs.locating import Located, locate
from qlora_wgpu.runs.opening import load_adapted, opened_as_trained
from qlora_wgpu.runs.reading import Texts
from qlora_wgpu.training import Observer


@dataclass(frozen=True)
class Opening:
    """What the command line says of how a base and an adapter are opened.

    Attributes:
        model: Folder or hub name of the base.
        adapter: Folder of a PEFT adapter, or None.
        config: A run's YAML that says how the adapter was trained, or None.
        explicit: The options that were given, by the settings that they stand for.
        by_run: Whether RUN names them.
    """

    model: str
    adapter: str | None
    config: str | None
    explicit: Changes
    by_run: bool = False

    def settings(self, observer: Observer) -> Config:
        """The settings to open with: the options', else the YAML's, else the adapter's run's.

        Raises:
            ConfigError: If a YAML is damaged.
        """
        if self.config is not None:
            return changed(read_settings(self.config, ()), self.explicit)
        defaults = Config(model=ModelConfig(path=self.model))
        return opened_as_trained(defaults, self.adapter, observer, self.explicit)


def open_adapted(
    console: Console, source: OpenedModel, opening: Opening, texts: Texts
) -> QLoRAModel:
    """Loads a model with an adapter, or with one that does nothing, showing a bar."""
    with Display(console) as display:
        settings = opening.settings(display)
        return load_adapted(source, opening.adapter, settings, display, texts)


def memory_of(text: str | None) -> int | str | None:
    """What ``--memory`` says.

    Raises:
        ConfigError: If it is no size.
    """
    return text if text in (None, "auto") else read_bytes("--memory", text)


def gpu_option(
    text: str, *old_names: str, default: str | None = "auto", show_default: bool | str = True
) -> Callable[..., Any]:
    """``--gpu``, which is still read under the names that the option used to have.

    Args:
        text: The help.
        old_names: Former names, such as ``"--device"``; they are not shown.
        default: The value without the option.
        show_default: Whether the help shows it, or what it shows instead.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for name in old_names:
            command = click.option(
                name, "old_gpu", hidden=True, expose_value=False, callback=_take_old_name
            )(command)
        option = click.option(
            "--gpu", default=default, show_default=show_default, is_eager=True, help=text
        )
        return option(command)

    return decorate


def _take_old_name(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        context.params["gpu"] = value


_OPENING = (
    click.option(
        "--config",
        help="YAML of the run that trained the adapter; by default that of the run in whose "
        "folder the adapter lies.",
    ),
    click.option(
        "--scheme",
        show_default="as trained, or nf4",
        type=click.Choice(["nf4", "none"]),
        help="How linear layers are stored: 4 bits a weight, or as they are.",
    ),
    click.option(
        "--compute-dtype",
        show_default="as trained, or bfloat16",
        type=click.Choice(["bfloat16", "float32"]),
        help="Type of matmul operands; sums are float32 either way.",
    ),
    click.option(
        "--backend",
        show_default="as trained, or auto",
        type=click.Choice(["auto", "wgpu", "dawn"]),
        help="WebGPU implementation.",
    ),
    click.option(
        "--memory",
        show_default="as trained, or auto",
        help="Memory of the device that may be taken, such as 8GiB; what has no room waits in host "
        "memory.",
    ),
    gpu_option(
        "The GPU to use: its index or a part of its name, as doctor lists them.",
        "--device",
        default=None,
        show_default="as trained, or auto",
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
        "--min-p",
        default=0.0,
        show_default=True,
        type=click.FloatRange(0, 1),
        help="Sample among tokens that have at least this share of the likeliest's probability.",
    ),
    click.option(
        "--repetition-penalty",
        default=1.0,
        show_default=True,
        type=click.FloatRange(0, min_open=True),
        help="Divides the positive logits of tokens that the text already has; 1 changes nothing.",
    ),
    click.option(
        "--seed",
        default=0,
        show_default=True,
        type=click.IntRange(0),
        help="Seed of the random choice of tokens.",
    ),
)


def run_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    """``RUN``, and the options that say in other words which model and adapter are meant."""
    for decorate in (
        click.option("--adapter", help="Folder of a PEFT adapter, instead of RUN."),
        click.option(
            "--model", help="Folder or hub name of the base model, whatever RUN says of it."
        ),
        click.argument("run", required=False, type=click.Path()),
    ):
        command = decorate(command)
    return command


def located(
    run: str | None, model: str | None, adapter: str | None, *, needs_adapter: bool
) -> Located:
    """What ``run_argument`` names.

    Raises:
        ConfigError: If it names nothing, too much, or no adapter where one is needed.
    """
    if needs_adapter and run is model is adapter is None:
        raise ConfigError("name a run's folder, such as runs/first, or an adapter with --adapter")
    named = locate(run, model, adapter)
    if needs_adapter and named.adapter is None:
        raise ConfigError(
            f"{named.model} is a model: name a run's folder, such as runs/first, or --adapter"
        )
    return named


def opening_options(*, needs_adapter: bool = False) -> Callable[..., Any]:
    """The argument and options that say which model and adapter, and how they are opened.

    The command gets them as one argument, ``opening``.

    Args:
        needs_adapter: Whether an adapter must be named.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def with_opening(
            run: str | None,
            model: str | None,
            adapter: str | None,
            config: str | None,
            scheme: str | None,
            compute_dtype: str | None,
            backend: str | None,
            gpu: str | None,
            memory: str | None,
            **others: Any,
        ) -> Any:
            given: dict[str, dict[str, Any]] = {
                "quant": {"scheme": scheme},
                "train": {"compute_dtype": compute_dtype},
                "device": {"backend": backend, "gpu": gpu, "memory": memory_of(memory)},
            }
            named = located(run, model, adapter, needs_adapter=needs_adapter)
            opening = Opening(
                named.model, named.adapter, config, without_none(given), by_run=run is not None
            )
            return command(opening=opening, **others)

        for option in reversed(_OPENING):
            with_opening = option(with_opening)
        return run_argument(with_opening)

    return decorate


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say how tokens are chosen."""
    for option in reversed(_SAMPLING):
        command = option(command)
    return command
