"""``generate``: text from a base model, with or without an adapter."""

from __future__ import annotations

from typing import Any

import click

from qlora_wgpu.cli._model import Opening, open_adapted, opening_options, sampling_options
from qlora_wgpu.cli._terminal import Terminal, write
from qlora_wgpu.cli._text import chat_ids, chat_template, longest, stop_ids, stop_text, stream
from qlora_wgpu.data import ChatTemplate, Tokenizer, find_chat_template
from qlora_wgpu.generation import generate as generate_tokens
from qlora_wgpu.runs import OpenedModel


@click.command()
@opening_options()
@click.option("--prompt", required=True, help="Text to continue.")
@click.option(
    "--chat", is_flag=True, help="Put the prompt into the chat template as a user's turn."
)
@click.option(
    "--chat-template",
    "template_name",
    help="Chat template instead of the tokenizer's: a .jinja file, or chatml.",
)
@sampling_options
def generate(
    opening: Opening,
    prompt: str,
    chat: bool,
    template_name: str | None,
    **sampling: Any,
) -> None:
    """Generate text with a model, and an adapter if one is given.

    An adapter in the folder of its run is opened as the run's config.yaml says it was trained.
    """
    source = OpenedModel.open(opening.model)
    tokenizer = source.tokenizer
    template, prompt_ids = _prompt_ids(tokenizer, prompt, template_name, chat=chat)
    model = open_adapted(Terminal(stderr=True), source, opening)
    if not chat:
        write(prompt)
    tokens = generate_tokens(
        model,
        prompt_ids,
        stop_ids=stop_ids(tokenizer, template),
        max_length=longest(model),
        **sampling,
    )
    context = () if chat else prompt_ids
    stream(tokenizer, tokens, stop_text(tokenizer, template), context)


def _prompt_ids(
    tokenizer: Tokenizer, prompt: str, template_name: str | None, *, chat: bool
) -> tuple[ChatTemplate | None, list[int]]:
    """The template that says where a turn ends, and the prompt's tokens."""
    if chat:
        template = chat_template(tokenizer, template_name)
        return template, chat_ids(tokenizer, template, [{"role": "user", "content": prompt}])
    named = None if template_name is None else find_chat_template(template_name, tokenizer)
    return named, tokenizer.encode(prompt)
