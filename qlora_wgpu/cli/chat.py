"""``chat``: a conversation with a model, with the adapter on or off."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import click
from rich.console import Console

from qlora_wgpu.cli._model import base_options, open_adapted, sampling_options
from qlora_wgpu.cli._text import chat_ids, chat_template, longest, stop_ids, stop_text, stream
from qlora_wgpu.errors import DataError
from qlora_wgpu.generation import generate
from qlora_wgpu.runs import OpenedModel

_HELP = "/adapter on|off, /system TEXT, /reset, /help, /exit (or Ctrl-D)"


@click.command()
@base_options
@click.option("--system", help="System message that the conversation begins with.")
@click.option(
    "--chat-template",
    "wanted",
    help="Chat template instead of the tokenizer's: a .jinja file, or chatml.",
)
@sampling_options
def chat(
    model_path: str,
    adapter: str | None,
    scheme: str,
    compute_dtype: str,
    gpu: str,
    system: str | None,
    wanted: str | None,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
) -> None:
    """Talk with a model, and an adapter if one is given.

    A line is a turn; /adapter off answers with the base alone, /reset forgets the conversation.
    Turns can be piped in.
    """
    console = Console(stderr=True)
    source = OpenedModel.open(model_path)
    tokenizer = source.tokenizer
    template = chat_template(tokenizer, wanted)
    model = open_adapted(console, source, adapter, scheme, compute_dtype, gpu)
    stops, until = stop_ids(tokenizer, template), stop_text(tokenizer, template)
    limit = longest(model)
    console.print(f"{model.name_or_path} on {model.device.name}: {_HELP}", highlight=False)
    talk = _Conversation(system)
    use_adapter = adapter is not None
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
        elif word == "/adapter" and rest in ("on", "off"):
            use_adapter = rest == "on" and adapter is not None
            console.print(f"the adapter is {'on' if use_adapter else 'off'}", style="dim")
        elif word.startswith("/"):
            console.print(_HELP, style="dim", highlight=False)
        else:
            ids = chat_ids(tokenizer, template, talk.asked(line))
            off = model.adapter_off() if adapter is not None and not use_adapter else nullcontext()
            try:
                with off:
                    answer = stream(
                        tokenizer,
                        generate(
                            model,
                            ids,
                            max_new_tokens=max_new_tokens,
                            temperature=temperature,
                            top_k=top_k,
                            top_p=top_p,
                            seed=seed + len(talk.messages),
                            stop_ids=stops,
                            max_length=limit,
                        ),
                        until,
                    )
            except DataError as err:
                console.print(f"{err}: /reset begins anew", style="yellow", highlight=False)
                continue
            except KeyboardInterrupt:
                sys.stdout.write("\n")
                continue
            talk.answered(line, answer)


class _Conversation:
    """What has been said."""

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
    """A line, or None at the end."""
    try:
        if sys.stdin.isatty():
            return console.input("[bold]> [/bold]").strip()
        line = sys.stdin.readline()
    except (EOFError, KeyboardInterrupt):
        return None
    return line.strip() if line else None
