"""What verbs that write text share: streaming it, and where it stops."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from qlora_wgpu.data import ChatTemplate, Tokenizer, end_of_turn, find_chat_template
from qlora_wgpu.errors import TokenizerError
from qlora_wgpu.models.qlora_model import QLoRAModel


def stream(tokenizer: Tokenizer, tokens: Iterable[int]) -> str:
    """Writes tokens to stdout as they come; returns their text."""
    ids: list[int] = []
    shown = ""
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids)
        # Half a character decodes to the replacement sign: wait for its other half.
        if not text.endswith("\ufffd"):
            sys.stdout.write(text[len(shown) :])
            sys.stdout.flush()
            shown = text
    text = tokenizer.decode(ids)
    sys.stdout.write(text[len(shown) :] + "\n")
    sys.stdout.flush()
    return text


def chat_template(tokenizer: Tokenizer, wanted: str | None) -> ChatTemplate:
    """The template of a conversation.

    Raises:
        TokenizerError: If there is none.
    """
    template = find_chat_template(wanted, tokenizer)
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
    found = model.folder.config.get("max_position_embeddings")
    return found if isinstance(found, int) and found > 0 else None
