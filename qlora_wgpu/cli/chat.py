"""``chat``: a conversation with a model, with the adapter on or off."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import click

from qlora_wgpu.cli._opening import (
    ModelOptions,
    opening_options,
    prompt_format,
    require_template,
    stream,
)
from qlora_wgpu.cli._options import chat_template_option, sampling_options
from qlora_wgpu.cli._terminal import Terminal, write
from qlora_wgpu.data import PromptFormat
from qlora_wgpu.errors import DataError, QLoRAError
from qlora_wgpu.generation import QLoRAModel, generate
from qlora_wgpu.limits import MIB
from qlora_wgpu.model.adapter_set import LoadedAdapter
from qlora_wgpu.runs import OpenedModel
from qlora_wgpu.runs.resolve import adapter_in
from qlora_wgpu.runs.workload import GenerationWorkload

_CONVERSATION = 2048  # tokens that are planned for; a longer one takes what is left
_END = "Ctrl-Z and Enter" if os.name == "nt" else "Ctrl-D"
_HELP = f"/adapter on|off|NAME|FOLDER, /system TEXT, /reset, /help, /exit (or {_END})"
_TEXT_ONLY = (
    "note: this adapter has learnt to continue text, not to chat: each line is continued as it is, "
    "and the lines before are forgotten (`qlora-wgpu generate` does it for one text)"
)


@click.command()
@opening_options()
@click.option("--system", help="System message that the conversation begins with.")
@chat_template_option
@sampling_options
def chat(
    opening: ModelOptions, system: str | None, template_name: str | None, **sampling: Any
) -> None:
    """Talk with what a run has trained, or with any model and adapter.

    RUN is a run's folder, such as runs/first, or an adapter's or a model's. An adapter in the
    folder of its run is opened as the run's config.yaml says it was trained, and prompts are
    written as it has learnt them: with the chat template, Alpaca's prompt, or as plain text.

    A line is a turn; /adapter off answers with the base alone, /adapter runs/second with another
    adapter of the same base, /reset forgets the conversation. Turns can be piped in.
    """
    console = Terminal(stderr=True)
    source = OpenedModel.open(opening.model)

    def prompt_of(adapter: str | None) -> PromptFormat:
        return require_template(prompt_format(source, adapter, template_name))

    prompt = prompt_of(opening.adapter)
    texts = GenerationWorkload.of(source.pretrained, _CONVERSATION, sampling["max_new_tokens"])
    model = opening.load(console, source, texts)
    if prompt.kind == "text":
        console.print(_TEXT_ONLY, style="yellow")
    console.print(f"{model.name_or_path} on {model.device.name}: {_HELP}")
    talk = _Conversation(model, prompt_of, sampling, system)
    talk.use(prompt, has_adapter=opening.adapter is not None)
    while (line := _read(console)) is not None:
        word, _, rest = line.partition(" ")
        if not line:
            continue
        if word in ("/exit", "/quit"):
            break
        if word == "/reset":
            talk.begin(talk.system)
        elif word == "/system":
            talk.begin(rest or None)
        elif word == "/adapter":
            console.print(talk.adapter(rest), style="dim")
        elif word.startswith("/"):
            console.print(_HELP, style="dim")
        else:
            try:
                talk.answer(line)
            except DataError as err:
                console.print(f"{err}: /reset begins anew", style="yellow")
            except KeyboardInterrupt:
                write("\n")


class _Conversation:
    """What was said so far, and the model and adapter that answer."""

    def __init__(
        self, model: QLoRAModel, prompt_of: Callable[[str | None], PromptFormat],
        sampling: dict[str, Any], system: str | None,
    ) -> None:  # fmt: skip
        self._model, self._prompt_of, self._sampling = model, prompt_of, sampling
        self.begin(system)

    def begin(self, system: str | None) -> None:
        """Forgets all that was said, but for the system message."""
        self.system = system
        self._messages = [] if system is None else [{"role": "system", "content": system}]

    def use(self, prompt: PromptFormat, *, has_adapter: bool) -> None:
        """Answers with another adapter from now on, which is on."""
        self._prompt = prompt
        self._is_on = self._has_adapter = has_adapter

    def answer(self, line: str) -> None:
        """Answers a line, and keeps both; an answer that is cut short is not kept."""
        asked = [*self._messages, {"role": "user", "content": line}]
        sampling = {**self._sampling, "seed": self._sampling["seed"] + len(self._messages)}
        is_off = self._has_adapter and not self._is_on
        with self._model.disable_adapter() if is_off else nullcontext():
            tokens = generate(
                self._model,
                self._prompt.ids(asked),
                stop_ids=self._prompt.stop_ids,
                max_length=self._model.max_length,
                **sampling,
            )
            answer = stream(self._prompt.tokenizer, tokens, self._prompt.stop_text)
        self._messages = [*asked, {"role": "assistant", "content": answer}]

    def adapter(self, what: str) -> str:
        """Does what ``/adapter`` asks for, and says what is so then."""
        if what in ("on", "off"):
            self._is_on = what == "on" and self._has_adapter
            return f"the adapter is {'on' if self._is_on else 'off'}"
        try:
            return self._chosen(what) if what else self._listed()
        except QLoRAError as err:
            return str(err)

    def _chosen(self, name: str) -> str:
        model = self._model
        if name not in model.adapters:
            folder = adapter_in(name) or name
            self._prompt_of(folder)  # before anything is taken
            model.load_adapter(folder, name)
        model.set_adapter(name)
        now = model.adapters[name]
        self.use(self._prompt_of(now.path), has_adapter=now.path is not None)
        return f"answers come from {_in_words(now)}"

    def _listed(self) -> str:
        return "\n".join(
            ("* " if name == self._model.active_adapter else "  ") + _in_words(adapter)
            for name, adapter in self._model.adapters.items()
        )


def _in_words(adapter: LoadedAdapter) -> str:
    if adapter.path is None:
        return f"{adapter.name}: the base alone"
    where = "" if adapter.path == adapter.name else f" ({adapter.path})"
    size = f"{adapter.device_bytes / MIB:,.1f} MiB on the device"
    return f"{adapter.name}{where}: r {adapter.config.r}, {size}"


def _read(console: Terminal) -> str | None:
    """A line, or None at the end."""
    try:
        if sys.stdin.isatty():
            return console.input("[bold]> [/bold]").strip()
        line = sys.stdin.readline()
    except (EOFError, KeyboardInterrupt):
        return None
    except UnicodeDecodeError as err:
        raise DataError(f"what is piped or typed in is not text in {err.encoding}") from err
    return line.strip() if line else None
