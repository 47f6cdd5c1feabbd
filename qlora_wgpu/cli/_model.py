"""Options that several verbs share, and the model that they open."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from qlora_wgpu.checkpoint.atomic import write_file
from qlora_wgpu.cli._display import Display
from qlora_wgpu.cli._terminal import Terminal, write
from qlora_wgpu.config import Config, ModelConfig
from qlora_wgpu.config.as_trained import Changes, changed, without_none
from qlora_wgpu.config.problems import RenamedKeyWarning
from qlora_wgpu.config.values import parse_bytes
from qlora_wgpu.data import PromptFormat, Tokenizer, find_chat_template, suitable_template
from qlora_wgpu.errors import ConfigError, TokenizerError, brief
from qlora_wgpu.generation import QLoRAModel
from qlora_wgpu.generation.text import TextStream
from qlora_wgpu.presence import exists, is_dir
from qlora_wgpu.runs import OpenedModel
from qlora_wgpu.runs.opening import load_adapted, opened_as_trained
from qlora_wgpu.runs.resolve import ModelRef, prompt_for, resolve_model
from qlora_wgpu.runs.settings import as_config
from qlora_wgpu.runs.workload import GenerationWorkload
from qlora_wgpu.training import Observer

MOST_PORTS = 65_535


def whole_number(option: str, text: str, most: int | None = None) -> int:
    """A whole number above zero.

    Raises:
        ConfigError: If the text is none, or more than it may be.
    """
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise ConfigError(f"{option} must be a whole number above zero, got {brief(text)}")
    if most is not None and value > most:
        raise ConfigError(f"{option} must be at most {most:,}, got {brief(value)}")
    return value


def read_bytes(option: str, text: str) -> int:
    """A size in bytes: ``8GiB`` and ``8Gi`` are 8 · 2^30, ``8GB`` and ``8G`` are 8 · 10^9.

    Raises:
        ConfigError: If the text is none.
    """
    size = parse_bytes(text)
    if not size:
        raise ConfigError(f"{option} must be a size such as 8GiB or 500MiB, got {text!r}")
    return size


def target_file(option: str, name: str) -> Path:
    """Where an option's file goes; where a link leads, so that the link stays one.

    Raises:
        ConfigError: If nothing can be written there.
    """
    path = Path(name).expanduser()
    if not name or is_dir(path):
        raise ConfigError(f"{option} {name!r} is not a file name: give one such as figures.json")
    if not is_dir(path.parent):
        raise ConfigError(f"{option} {name}: there is no folder {path.parent}")
    if not os.access(path if exists(path) else path.parent, os.W_OK):
        raise ConfigError(f"{option} {name} cannot be written: you may not write there")
    return path.resolve() if path.is_symlink() else path


def write_figures(path: Path, figures: dict[str, Any]) -> None:
    """Writes an option's file as JSON.

    Raises:
        CheckpointError: If that fails.
    """
    write_file(path, (json.dumps(figures, indent=1) + "\n").encode())


def read_settings(path: str, overrides: Sequence[str]) -> Config:
    """Reads a configuration: a YAML file, or the one that a run's folder keeps.

    Raises:
        ConfigError: If anything in it is wrong.
    """
    with renamed_keys_told():
        return as_config(path, overrides)


@contextmanager
def renamed_keys_told() -> Iterator[None]:
    """While it is entered, a key that is read under an old name is told on stderr."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", RenamedKeyWarning)
        show = warnings.showwarning

        def tell(message: Any, category: type[Warning], *where: Any, **options: Any) -> None:
            if not issubclass(category, RenamedKeyWarning):
                show(message, category, *where, **options)
                return
            console = Terminal(stderr=True, soft_wrap=True)
            console.print(f"note: {message}", style="yellow", highlight=False, markup=False)

        warnings.showwarning = tell
        yield


def stream(
    tokenizer: Tokenizer,
    tokens: Iterable[int],
    stop_text: str = "",
    context: Sequence[int] = (),
) -> str:
    """Writes tokens to stdout as they come; returns their text.

    Args:
        tokenizer: The model's tokenizer.
        tokens: What is generated.
        stop_text: The text that ends it, which is not written.
        context: Tokens of the text that they go on with.
    """
    stream = TextStream(tokenizer, [stop_text], context)
    for token in tokens:
        write(stream.push(token))
        if stream.stopped:
            break
    write(stream.rest() + "\n")
    return stream.text


def prompt_format(source: OpenedModel, adapter: str | None, setting: str | None) -> PromptFormat:
    """How prompts are written: as the adapter was trained, or with a chat template by its name.

    Raises:
        TokenizerError: If the template is broken, or a file of the tokenizer damaged.
        CheckpointError: If what is kept beside the adapter is damaged.
    """
    prompt = prompt_for(source, adapter)
    if setting is None:
        return prompt
    return PromptFormat("chat", prompt.tokenizer, find_chat_template(setting, prompt.tokenizer))


def require_template(prompt: PromptFormat) -> PromptFormat:
    """The prompt's format, if it can write what somebody says.

    Raises:
        TokenizerError: If it is chats, and no template is known.
    """
    if prompt.kind == "chat" and prompt.template is None:
        raise TokenizerError(
            "the model has no chat template: give --chat-template a .jinja file or a built-in name "
            f"({suitable_template(prompt.tokenizer)} fits its tokenizer), or let it go on with "
            "texts: qlora-wgpu generate --no-chat"
        )
    return prompt


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
    console: Console, source: OpenedModel, opening: Opening, texts: GenerationWorkload
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
) -> ModelRef:
    """What ``run_argument`` names.

    Raises:
        ConfigError: If it names nothing, too much, or no adapter where one is needed.
    """
    if needs_adapter and run is model is adapter is None:
        raise ConfigError("name a run's folder, such as runs/first, or an adapter with --adapter")
    named = resolve_model(run, model, adapter)
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
