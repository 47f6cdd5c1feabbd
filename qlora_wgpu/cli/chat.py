"""``chat``: a conversation with a model, with the adapter on or off."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import click
from rich.console import Console

from qlora_wgpu.cli._model import (
    Opening,
    open_adapted,
    opening_options,
    prompt_format,
    require_template,
    sampling_options,
    stream,
)
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
@click.option(
    "--chat-template",
    "template_name",
    help="Chat template instead of the run's or the tokenizer's: a .jinja file, or a built-in "
    "name.",
)
@sampling_options
def chat(
    opening: Opening,
    system: str | None,
    template_name: str | None,
    **sampling: Any,
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
    formats = _Formats(source, template_name)
    prompt = formats.of(opening.adapter)
    texts = GenerationWorkload.of(source.pretrained, _CONVERSATION, sampling["max_new_tokens"])
    model = open_adapted(console, source, opening, texts)
    if prompt.kind == "text":
        console.print(_TEXT_ONLY, style="yellow", highlight=False)
    console.print(f"{model.name_or_path} on {model.device.name}: {_HELP}", highlight=False)
    answers = _Answers(model, prompt, sampling, has_adapter=opening.adapter is not None)
    adapters = _Adapters(model, answers, formats)
    talk = _Conversation(system)
    while (line := _read(console)) is not None:
        word, _, rest = line.partition(" ")
        if not line:
            continue
        if word in ("/exit", "/quit"):
            break
        if word == "/reset":
            talk = _Conversation(talk.system)
        elif word == "/system":
            talk = _Conversation(rest or None)
        elif word == "/adapter":
            console.print(adapters.told(rest), style="dim", highlight=False)
        elif word.startswith("/"):
            console.print(_HELP, style="dim", highlight=False)
        else:
            _take_turn(console, answers, talk, line)


def _take_turn(console: Console, answers: _Answers, talk: _Conversation, line: str) -> None:
    """Answers a line, and keeps both; an answer that is cut short is not kept."""
    try:
        answer = answers.stream(talk.asked(line), turn=len(talk.messages))
    except DataError as err:
        console.print(f"{err}: /reset begins anew", style="yellow", highlight=False)
    except KeyboardInterrupt:
        write("\n")
    else:
        talk.answered(line, answer)


class _Answers:
    """Writes what the model says next to stdout."""

    def __init__(
        self,
        model: QLoRAModel,
        prompt: PromptFormat,
        sampling: dict[str, Any],
        *,
        has_adapter: bool,
    ) -> None:
        self.adapter_on = self._has_adapter = has_adapter
        self._model = model
        self._prompt = prompt
        self._sampling = sampling

    def switch_adapter(self, *, on: bool) -> None:
        """Turns the adapter, if there is one, on or off from the next answer on."""
        self.adapter_on = on and self._has_adapter

    def use(self, prompt: PromptFormat, *, has_adapter: bool) -> None:
        """Answers with another adapter from now on, which is on."""
        self._prompt = prompt
        self.adapter_on = self._has_adapter = has_adapter

    def stream(self, messages: list[dict[str, Any]], turn: int) -> str:
        """The answer, written as it comes."""
        sampling = {**self._sampling, "seed": self._sampling["seed"] + turn}
        with self._adapter():
            tokens = generate(
                self._model,
                self._prompt.ids(messages),
                stop_ids=self._prompt.stop_ids,
                max_length=self._model.max_length,
                **sampling,
            )
            return stream(self._prompt.tokenizer, tokens, self._prompt.stop_text)

    def _adapter(self) -> AbstractContextManager[None]:
        if self._has_adapter and not self.adapter_on:
            return self._model.disable_adapter()
        return nullcontext()


class _Formats:
    """How prompts are written for each adapter."""

    def __init__(self, source: OpenedModel, template_name: str | None) -> None:
        self._source = source
        self._template_name = template_name

    def of(self, adapter: str | None) -> PromptFormat:
        """For an adapter's folder, or for the base."""
        return require_template(prompt_format(self._source, adapter, self._template_name))


class _Adapters:
    """What ``/adapter`` does."""

    def __init__(self, model: QLoRAModel, answers: _Answers, formats: _Formats) -> None:
        self._model = model
        self._answers = answers
        self._formats = formats

    def told(self, what: str) -> str:
        """Does what is asked for, and says what is so then."""
        answers = self._answers
        if what in ("on", "off"):
            answers.switch_adapter(on=what == "on")
            return f"the adapter is {'on' if answers.adapter_on else 'off'}"
        try:
            return self._chosen(what) if what else self._all()
        except QLoRAError as err:
            return str(err)

    def _chosen(self, name: str) -> str:
        model = self._model
        if name not in model.adapters:
            folder = adapter_in(name) or name
            self._formats.of(folder)  # before anything is taken
            model.load_adapter(folder, name)
        model.set_adapter(name)
        now = model.adapters[name]
        self._answers.use(self._formats.of(now.path), has_adapter=now.path is not None)
        return f"answers come from {_in_words(now)}"

    def _all(self) -> str:
        each = [
            ("* " if name == self._model.active_adapter else "  ") + _in_words(adapter)
            for name, adapter in self._model.adapters.items()
        ]
        return "\n".join(each)


def _in_words(adapter: LoadedAdapter) -> str:
    if adapter.path is None:
        return f"{adapter.name}: the base alone"
    where = "" if adapter.path == adapter.name else f" ({adapter.path})"
    size = f"{adapter.device_bytes / MIB:,.1f} MiB on the device"
    return f"{adapter.name}{where}: r {adapter.config.r}, {size}"


class _Conversation:
    """A conversation's messages so far."""

    def __init__(self, system: str | None) -> None:
        self.system = system
        self.messages: list[dict[str, Any]] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})

    def asked(self, text: str) -> list[dict[str, Any]]:
        """All of it, with a new turn of the user's."""
        return [*self.messages, {"role": "user", "content": text}]

    def answered(self, text: str, answer: str) -> None:
        """Keeps a turn and its answer."""
        self.messages = [*self.asked(text), {"role": "assistant", "content": answer}]


def _read(console: Console) -> str | None:
    """A line, or None at the end.

    Raises:
        DataError: If it is not text.
    """
    try:
        if sys.stdin.isatty():
            return console.input("[bold]> [/bold]").strip()
        line = sys.stdin.readline()
    except (EOFError, KeyboardInterrupt):
        return None
    except UnicodeDecodeError as err:
        raise DataError(f"what is piped or typed in is not text in {err.encoding}") from err
    return line.strip() if line else None
