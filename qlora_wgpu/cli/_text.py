"""Streaming of generated text, and where it stops, for the commands that write some."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from qlora_wgpu.cli._terminal import write
from qlora_wgpu.data import ChatTemplate, Tokenizer, closing_text, end_of_turn, find_chat_template
from qlora_wgpu.errors import TokenizerError
from qlora_wgpu.generation import continuation
from qlora_wgpu.model.qlora_model import QLoRAModel


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
    ids: list[int] = []
    shown = ""
    for token in tokens:
        ids.append(token)
        text = continuation(tokenizer, context, ids)
        if stop_text and stop_text in text:
            break
        # Half a character decodes to the replacement sign: wait for its other half. What may be
        # the beginning of the end is held back, too.
        held = _beginning(text, stop_text)
        if not text.endswith("\ufffd") and len(text) - held > len(shown):
            write(text[len(shown) : len(text) - held])
            shown = text[: len(text) - held]
    text = continuation(tokenizer, context, ids)
    text = text.partition(stop_text)[0] if stop_text else text
    write(text[len(shown) :] + "\n")
    return text


def _beginning(text: str, stop_text: str) -> int:
    """The number of characters at the end of a text that begin another one."""
    sizes = range(min(len(stop_text), len(text)), 0, -1)
    return next((n for n in sizes if text.endswith(stop_text[:n])), 0)


def stop_text(tokenizer: Tokenizer, template: ChatTemplate | None) -> str:
    """The text that ends a turn; empty where a single token does."""
    if template is None or end_of_turn(template, tokenizer) is not None:
        return ""
    return closing_text(template)


def chat_template(tokenizer: Tokenizer, setting: str | None) -> ChatTemplate:
    """The template of a conversation.

    Raises:
        TokenizerError: If there is none.
    """
    template = find_chat_template(setting, tokenizer)
    if template is None:
        raise TokenizerError(
            "the model has no chat template: give --chat-template a .jinja file or chatml, or "
            "generate without --chat"
        )
    return template


def chat_ids(
    tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[dict[str, Any]]
) -> list[int]:
    """A conversation up to where the assistant is to speak."""
    text = template.render(messages, add_generation_prompt=True).text
    return tokenizer.encode(text, add_special_tokens=False)


def stop_ids(tokenizer: Tokenizer, template: ChatTemplate | None) -> frozenset[int]:
    """Tokens that end a text: the tokenizer's, and what the template ends a turn with."""
    turn = end_of_turn(template, tokenizer) if template is not None else None
    return tokenizer.eos_token_ids | ({turn} if turn is not None else set())


def longest(model: QLoRAModel) -> int | None:
    """Most tokens that the model was made for, where its config.json says it."""
    length = model.folder.config.get("max_position_embeddings")
    return length if isinstance(length, int) and length > 0 else None
