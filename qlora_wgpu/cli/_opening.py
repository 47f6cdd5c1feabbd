"""Opening the model of RUN or of options, for several commands; prompts and streamed text."""

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
from qlora_wgpu.config.loading import Changes, changed, without_none
from qlora_wgpu.data import PromptFormat, Tokenizer, find_chat_template, suitable_template
from qlora_wgpu.errors import ConfigError, TokenizerError, option
from qlora_wgpu.generation import QLoRAModel
from qlora_wgpu.generation.text import TextStream
from qlora_wgpu.images.sources import ImageSource
from qlora_wgpu.model.feature_store import prompt_features
from qlora_wgpu.model.image_inputs import ImageFeatures
from qlora_wgpu.runs import OpenedModel
from qlora_wgpu.runs.opening import load_adapted, opened_as_trained
from qlora_wgpu.runs.prompts import prompt_for
from qlora_wgpu.runs.resolve import ModelRef, resolve_model
from qlora_wgpu.runs.settings import as_config
from qlora_wgpu.runs.workload import Workload
from qlora_wgpu.training import Observer

# ---- opening a model -----------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelOptions:
    """The options with which a base and an adapter are opened."""

    model: str  # folder or hub name of the base
    adapter: str | None  # folder of a PEFT adapter
    config: str | None  # YAML of the run that trained the adapter
    explicit: Changes  # options that were given, as settings
    by_run: bool = False  # whether RUN names model and adapter

    @classmethod
    def of(
        cls, run: str | None, model: str | None, adapter: str | None, config: str | None, *,
        scheme: str | None, compute_dtype: str | None, backend: str | None,
        memory: int | str | None, gpu: str | None, needs_adapter: bool = False,
    ) -> ModelOptions:  # fmt: skip
        """The model and adapter that RUN or the options name."""
        given: dict[str, dict[str, Any]] = {
            "quant": {"scheme": scheme},
            "train": {"compute_dtype": compute_dtype},
            "device": {"backend": backend, "gpu": gpu, "memory": memory},
        }
        named = located(run, model, adapter, needs_adapter=needs_adapter)
        return cls(named.model, named.adapter, config, without_none(given), run is not None)

    def settings(self, observer: Observer) -> Config:
        """The settings: of the options, else of the YAML, else of the adapter's run."""
        if self.config is not None:
            return changed(as_config(self.config, ()), self.explicit)
        defaults = Config(model=ModelConfig(path=self.model))
        return opened_as_trained(defaults, self.adapter, observer, self.explicit)

    def load(self, console: Terminal, source: OpenedModel, texts: Workload) -> QLoRAModel:
        """The model with its adapter, or with an empty one; shows a progress bar."""
        with Display(console) as display:
            return load_adapted(source, self.adapter, self.settings(display), display, texts)


_OPTIONS = (
    click.argument("run", required=False, type=click.Path()),
    click.option(
        "--model",
        type=FILE_OR_FOLDER,
        help="Folder or hub name of the base model, instead of RUN's.",
    ),
    click.option(
        "--adapter", type=FILE_OR_FOLDER, help="Folder of a PEFT adapter, instead of RUN."
    ),
    click.option(
        "--config",
        type=FILE_OR_FOLDER,
        help="YAML of the run that trained the adapter; by default the one in the adapter's run "
        "folder.",
    ),
    click.option(
        "--scheme",
        show_default="as trained, or nf4",
        type=click.Choice(["nf4", "none"]),
        help="Quantization of linear layers.",
    ),
    click.option(
        "--compute-dtype",
        show_default="as trained, or bfloat16",
        type=click.Choice(["bfloat16", "float32"]),
        help="Type of matmul operands; accumulation is in float32.",
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
        help="GPU memory to use, such as 8GiB; weights that do not fit are offloaded to the host.",
    ),
    gpu_option(
        "The GPU to use: its index or a part of its name, as doctor lists them.",
        "--device",
        default=None,
        show_default="as trained, or auto",
    ),
)


def opening_options(*, needs_adapter: bool = False) -> Callable[..., Any]:
    """Adds the argument and options of ``ModelOptions``, a command's first parameter."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def with_opening(
            *, run: str | None, model: str | None, adapter: str | None, config: str | None,
            scheme: str | None, compute_dtype: str | None, backend: str | None, gpu: str | None,
            memory: int | str | None, **others: Any
        ) -> Any:  # fmt: skip
            opening = ModelOptions.of(
                run, model, adapter, config, scheme=scheme, compute_dtype=compute_dtype,
                backend=backend, memory=memory, gpu=gpu, needs_adapter=needs_adapter,
            )  # fmt: skip
            return command(opening, **others)

        for decorator in reversed(_OPTIONS):
            with_opening = decorator(with_opening)
        return with_opening

    return decorate


def located(
    run: str | None, model: str | None, adapter: str | None, *, needs_adapter: bool
) -> ModelRef:
    if needs_adapter and run is model is adapter is None:
        raise ConfigError(
            f"pass a run's folder, such as runs/first, or an adapter with {option('adapter', ...)}"
        )
    named = resolve_model(run, model, adapter)
    if needs_adapter and named.adapter is None:
        raise ConfigError(
            f"{named.model} is a model: pass a run's folder, such as runs/first, or an adapter "
            f"with {option('adapter', ...)}"
        )
    return named


# ---- prompts and output --------------------------------------------------------------------------


def prompt_format(source: OpenedModel, adapter: str | None, setting: str | None) -> PromptFormat:
    """The prompt format that the adapter was trained with, or a chat template by its name."""
    prompt = prompt_for(source, adapter)
    if setting is None:
        return prompt
    return PromptFormat("chat", prompt.tokenizer, find_chat_template(setting, prompt.tokenizer))


def require_template(prompt: PromptFormat) -> PromptFormat:
    """Raises a TokenizerError for chats without a template."""
    if prompt.kind == "chat" and prompt.template is None:
        raise TokenizerError(
            "the model has no chat template: pass a .jinja file or a built-in name with "
            f"--chat-template ({suitable_template(prompt.tokenizer)} fits its tokenizer), or use "
            "qlora-wgpu generate --no-chat"
        )
    return prompt


def with_images(text: str, files: Sequence[str]) -> str | list[dict[str, str]]:
    """The content of a message: a text, after images if there are any."""
    if not files:
        return text
    images = [{"type": "image", "path": file} for file in files]
    return [*images, {"type": "text", "text": text}]


def features_of_prompt(
    source: OpenedModel, model: QLoRAModel, images: Sequence[ImageSource]
) -> list[ImageFeatures]:
    """The features of a prompt's images."""
    if not images:
        return []
    assert source.images is not None
    encode = prompt_features(source.pretrained, source.images, model.device, model.compute_dtype)
    return encode(images)


def stream(
    tokenizer: Tokenizer, tokens: Iterable[int], stop_text: str = "", context: Sequence[int] = ()
) -> str:
    """Streams tokens to stdout up to ``stop_text``, and returns their text.

    ``context`` are the tokens before them, which decide how the first ones are decoded.
    """
    stream = TextStream(tokenizer, [stop_text], context)
    for token in tokens:
        write(stream.push(token))
        if stream.stopped:
            break
    write(stream.rest() + "\n")
    return stream.text
