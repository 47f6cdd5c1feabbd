"""``chat``: a conversation with a model, with or without its adapter."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from qlora_wgpu.cli._opening import (
    ModelOptions,
    opening_options,
    prompt_format,
    require_template,
    stream,
    with_images,
)
from qlora_wgpu.cli._options import chat_template_option, sampling_options
from qlora_wgpu.cli._terminal import Terminal, write
from qlora_wgpu.data import PromptFormat
from qlora_wgpu.data.messages import canonical_options
from qlora_wgpu.errors import ConfigError, DataError, QLoRAError
from qlora_wgpu.generation import QLoRAModel, generate
from qlora_wgpu.images.sources import image_source
from qlora_wgpu.limits import MIB
from qlora_wgpu.model.adapter_set import LoadedAdapter
from qlora_wgpu.model.feature_store import prompt_features
from qlora_wgpu.runs import OpenedModel
from qlora_wgpu.runs.resolve import adapter_in
from qlora_wgpu.runs.workload import GenerationWorkload

_CONVERSATION = 2048  # tokens that memory is planned for; a longer one uses what is left
_END = "Ctrl-Z and Enter" if os.name == "nt" else "Ctrl-D"
_HELP = f"/adapter on|off|NAME|FOLDER, /system TEXT, /reset, /help, /exit (or {_END})"
_IMAGE_HELP = "/image FILE adds an image to the next turn"
_TEXT_ONLY = (
    "note: this adapter was trained on plain text, not on chats: each line is continued on its "
    "own, without the lines before (as by `qlora-wgpu generate`)"
)


@click.command()
@opening_options()
@click.option("--system", help="System message.")
@chat_template_option
@click.option(
    "--chat-template-kwargs",
    metavar="JSON",
    help='Variables of the chat template, such as \'{"reasoning_effort": "low"}\'.',
)
@sampling_options
def chat(
    opening: ModelOptions,
    system: str | None,
    template_name: str | None,
    chat_template_kwargs: str | None,
    **sampling: Any,
) -> None:
    """Chat with a run's model, or with any model and adapter.

    RUN is the folder of a run, such as runs/first, or of an adapter or a model. An adapter in its
    run's folder is opened with the settings of the run's config.yaml, and prompts have the format
    it was trained on: the chat template, Alpaca's prompt, or plain text.

    Each line is a turn. /adapter off disables the adapter, /adapter runs/second loads another one
    of the same base, and /reset clears the conversation. /image FILE adds an image to the next
    turn, for vision-language models. Turns can be piped in.
    """
    console = Terminal(stderr=True)
    options = canonical_options(chat_template_kwargs)
    source = OpenedModel.open(opening.model)

    def prompt_of(adapter: str | None) -> PromptFormat:
        prompt = require_template(prompt_format(source, adapter, template_name))
        if options and prompt.template is None:
            raise ConfigError("the model has no chat template: remove --chat-template-kwargs")
        return prompt

    prompt = prompt_of(opening.adapter)
    texts = GenerationWorkload.of(
        source.pretrained, _CONVERSATION, sampling["max_new_tokens"],
        images=source.images is not None,
    )  # fmt: skip
    model = opening.load(console, source, texts)
    if prompt.kind == "text":
        console.print(_TEXT_ONLY, style="yellow")
    console.print(f"{model.name_or_path} on {model.device.name}: {_HELP}")
    if source.images is not None:
        console.print(_IMAGE_HELP)
    talk = _Conversation(source, model, prompt_of, sampling, system, options)
    talk.use(prompt, has_adapter=opening.adapter is not None)
    while (line := _read(console)) is not None:
        word, _, rest = line.partition(" ")
        if not line:
            continue
        if word in ("/exit", "/quit"):
            break
        if word == "/reset":
            talk.reset(talk.system)
        elif word == "/system":
            talk.reset(rest or None)
        elif word == "/image":
            console.print(talk.add_image(rest), style="dim")
        elif word == "/adapter":
            console.print(talk.adapter(rest), style="dim")
        elif word.startswith("/"):
            console.print(_HELP, style="dim")
        else:
            try:
                talk.answer(line)
            except DataError as err:
                console.print(f"{err}: /reset clears the conversation", style="yellow")
            except KeyboardInterrupt:
                write("\n")


class _Conversation:
    """The messages so far, and the model that answers."""

    def __init__(
        self, source: OpenedModel, model: QLoRAModel,
        prompt_of: Callable[[str | None], PromptFormat], sampling: dict[str, Any],
        system: str | None, options: dict[str, Any],
    ) -> None:  # fmt: skip
        self._options = options
        self._model, self._prompt_of, self._sampling = model, prompt_of, sampling
        self._image_files = source.images
        if source.images is not None:
            dtype = model.compute_dtype
            self._encode = prompt_features(source.pretrained, source.images, model.device, dtype)
        self.reset(system)

    def reset(self, system: str | None) -> None:
        """Clears the conversation, and sets its system message."""
        self.system = system
        self._next_images: list[str] = []
        self._messages: list[dict[str, Any]] = (
            [] if system is None else [{"role": "system", "content": system}]
        )

    def add_image(self, file: str) -> str:
        """Adds an image to the next turn; returns what to print."""
        if self._image_files is None:
            return "images are not supported for this model"
        try:
            image = image_source(file, Path(), "the image").measured()
        except DataError as err:
            return str(err)
        self._next_images.append(file)
        return f"{image.width} x {image.height} pixels, for the next turn"

    def use(self, prompt: PromptFormat, *, has_adapter: bool) -> None:
        """Switches to an adapter, enabled, and its prompt format."""
        self._prompt = prompt
        self._is_on = self._has_adapter = has_adapter

    def answer(self, line: str) -> None:
        """Streams the answer to a line, and keeps both unless it is interrupted."""
        content = with_images(line, self._next_images)
        messages = [*self._messages, {"role": "user", "content": content}]
        ids, images = self._prompt.encoded(
            messages, options=self._options, images=self._image_files, folder=Path()
        )
        sampling = {**self._sampling, "seed": self._sampling["seed"] + len(self._messages)}
        is_off = self._has_adapter and not self._is_on
        with self._model.disable_adapter() if is_off else nullcontext():
            tokens = generate(
                self._model,
                ids,
                stop_ids=self._prompt.stop_ids,
                max_length=self._model.max_length,
                images=self._encode(images) if images else (),
                **sampling,
            )
            answer = stream(self._prompt.tokenizer, tokens, self._prompt.stop_text)
        self._messages = [*messages, {"role": "assistant", "content": answer}]
        self._next_images = []

    def adapter(self, argument: str) -> str:
        """Runs ``/adapter``; returns what to print."""
        if argument in ("on", "off"):
            self._is_on = argument == "on" and self._has_adapter
            return f"the adapter is {'on' if self._is_on else 'off'}"
        try:
            return self._select(argument) if argument else self._list()
        except QLoRAError as err:
            return str(err)

    def _select(self, name: str) -> str:
        model = self._model
        if name not in model.adapters:
            folder = adapter_in(name) or name
            self._prompt_of(folder)  # fails before memory is allocated
            model.load_adapter(folder, name)
        model.set_adapter(name)
        now = model.adapters[name]
        self.use(self._prompt_of(now.path), has_adapter=now.path is not None)
        return f"using {_describe(now)}"

    def _list(self) -> str:
        return "\n".join(
            ("* " if name == self._model.active_adapter else "  ") + _describe(adapter)
            for name, adapter in self._model.adapters.items()
        )


def _describe(adapter: LoadedAdapter) -> str:
    if adapter.path is None:
        return f"{adapter.name}: the base without an adapter"
    where = "" if adapter.path == adapter.name else f" ({adapter.path})"
    size = f"{adapter.device_bytes / MIB:,.1f} MiB on the GPU"
    return f"{adapter.name}{where}: r {adapter.config.r}, {size}"


def _read(console: Terminal) -> str | None:
    """A line of input, or None at its end."""
    try:
        if sys.stdin.isatty():
            return console.input("[bold]> [/bold]").strip()
        line = sys.stdin.readline()
    except (EOFError, KeyboardInterrupt):
        return None
    except UnicodeDecodeError as err:
        raise DataError(f"the input is not valid {err.encoding}") from err
    return line.strip() if line else None
