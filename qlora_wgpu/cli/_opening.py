"""The model that several commands open, by RUN or by options, and what it is then asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import click

from qlora_wgpu.cli._display import Display
from qlora_wgpu.cli._options import FILE_OR_FOLDER, SIZE_OR_AUTO, gpu_option
from qlora_wgpu.cli._terminal import Terminal, write
from qlora_wgpu.config import Config, ModelConfig
from qlora_wgpu.config.as_trained import Changes, changed, without_none
from qlora_wgpu.data import PromptFormat, Tokenizer, find_chat_template, suitable_template
from qlora_wgpu.errors import ConfigError, TokenizerError
from qlora_wgpu.generation import QLoRAModel
from qlora_wgpu.generation.text import TextStream
from qlora_wgpu.runs import OpenedModel
from qlora_wgpu.runs.opening import load_adapted, opened_as_trained
from qlora_wgpu.runs.prompts import prompt_for
from qlora_wgpu.runs.resolve import ModelRef, resolve_model
from qlora_wgpu.runs.settings import as_config
from qlora_wgpu.runs.workload import GenerationWorkload
from qlora_wgpu.training import Observer

# ---- which model, and how it is opened -----------------------------------------------------------


@dataclass(frozen=True)
class ModelOptions:
    """What the command line says of how a base and an adapter are opened."""

    model: str  # folder or hub name of the base
    adapter: str | None  # folder of a PEFT adapter
    config: str | None  # a run's YAML that says how the adapter was trained
    explicit: Changes  # the options that were given, by the settings that they stand for
    by_run: bool = False  # whether RUN names model and adapter

    def settings(self, observer: Observer) -> Config:
        """The settings to open with: the options', else the YAML's, else the adapter's run's."""
        if self.config is not None:
            return changed(as_config(self.config, ()), self.explicit)
        defaults = Config(model=ModelConfig(path=self.model))
        return opened_as_trained(defaults, self.adapter, observer, self.explicit)

    def load(self, console: Terminal, source: OpenedModel, texts: GenerationWorkload) -> QLoRAModel:
        """The model with its adapter, or with one that does nothing; a bar is shown."""
        with Display(console) as display:
            return load_adapted(source, self.adapter, self.settings(display), display, texts)


_OPTIONS = (
    click.argument("run", required=False, type=click.Path()),
    click.option(
        "--model",
        type=FILE_OR_FOLDER,
        help="Folder or hub name of the base model, whatever RUN says of it.",
    ),
    click.option(
        "--adapter", type=FILE_OR_FOLDER, help="Folder of a PEFT adapter, instead of RUN."
    ),
    click.option(
        "--config",
        type=FILE_OR_FOLDER,
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
        type=SIZE_OR_AUTO,
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


def opening_options(*, needs_adapter: bool = False) -> Callable[..., Any]:
    """The argument and options of ``ModelOptions``, which a command gets as its first argument."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def with_opening(
            *, run: str | None, model: str | None, adapter: str | None, config: str | None,
            scheme: str | None, compute_dtype: str | None, backend: str | None, gpu: str | None,
            memory: int | str | None, **others: Any
        ) -> Any:  # fmt: skip
            given: dict[str, dict[str, Any]] = {
                "quant": {"scheme": scheme},
                "train": {"compute_dtype": compute_dtype},
                "device": {"backend": backend, "gpu": gpu, "memory": memory},
            }
            named = located(run, model, adapter, needs_adapter=needs_adapter)
            explicit, by_run = without_none(given), run is not None
            return command(
                ModelOptions(named.model, named.adapter, config, explicit, by_run), **others
            )

        for option in reversed(_OPTIONS):
            with_opening = option(with_opening)
        return with_opening

    return decorate


def located(
    run: str | None, model: str | None, adapter: str | None, *, needs_adapter: bool
) -> ModelRef:
    """The model and adapter that RUN or the options name."""
    if needs_adapter and run is model is adapter is None:
        raise ConfigError("name a run's folder, such as runs/first, or an adapter with --adapter")
    named = resolve_model(run, model, adapter)
    if needs_adapter and named.adapter is None:
        raise ConfigError(
            f"{named.model} is a model: name a run's folder, such as runs/first, or --adapter"
        )
    return named


# ---- prompts and texts ---------------------------------------------------------------------------


def prompt_format(source: OpenedModel, adapter: str | None, setting: str | None) -> PromptFormat:
    """How prompts are written: as the adapter was trained, or with a chat template by its name."""
    prompt = prompt_for(source, adapter)
    if setting is None:
        return prompt
    return PromptFormat("chat", prompt.tokenizer, find_chat_template(setting, prompt.tokenizer))


def require_template(prompt: PromptFormat) -> PromptFormat:
    """The prompt's format, refused where it is chats and no template is known."""
    if prompt.kind == "chat" and prompt.template is None:
        raise TokenizerError(
            "the model has no chat template: give --chat-template a .jinja file or a built-in name "
            f"({suitable_template(prompt.tokenizer)} fits its tokenizer), or let it go on with "
            "texts: qlora-wgpu generate --no-chat"
        )
    return prompt


def stream(
    tokenizer: Tokenizer, tokens: Iterable[int], stop_text: str = "", context: Sequence[int] = ()
) -> str:
    """Writes tokens to stdout as they come, up to ``stop_text``; returns their text.

    ``context`` are tokens of the text that they go on with.
    """
    stream = TextStream(tokenizer, [stop_text], context)
    for token in tokens:
        write(stream.push(token))
        if stream.stopped:
            break
    write(stream.rest() + "\n")
    return stream.text
