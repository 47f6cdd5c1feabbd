"""What a text or a conversation is to a model: its tokens, and where what follows ends."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qlora_wgpu.data import ChatTemplate, Tokenizer, closing_text, end_of_turn, find_chat_template
from qlora_wgpu.errors import ConfigError, TokenizerError


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as tokens.

    Attributes:
        ids: The tokens.
        stop_ids: Tokens that end what follows.
        stop_text: The text that ends it; empty where a single token does.
        context: The tokens whose text goes on; none where what follows is a turn of its own.
    """

    ids: list[int]
    stop_ids: frozenset[int]
    stop_text: str = ""
    context: Sequence[int] = ()


def encode_text(text: str, tokenizer: Tokenizer) -> EncodedPrompt:
    """A text that goes on.

    Raises:
        TokenizerError: If it cannot be encoded.
    """
    ids = tokenizer.encode(text)
    return EncodedPrompt(ids, tokenizer.eos_token_ids, context=ids)


def encode_ids(ids: Sequence[Any], tokenizer: Tokenizer) -> EncodedPrompt:
    """Token ids that go on.

    Raises:
        ConfigError: If they are none.
    """
    try:
        return EncodedPrompt([operator.index(i) for i in ids], tokenizer.eos_token_ids)
    except TypeError:
        raise ConfigError(
            "a prompt is a text, token ids, or messages such as {'role': 'user', 'content': '...'}"
        ) from None


def encode_chat(
    messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, chat_template: str | None = None
) -> EncodedPrompt:
    """A conversation up to where the assistant is to speak.

    Args:
        messages: Turns with ``role`` and ``content``.
        tokenizer: The model's.
        chat_template: A ``.jinja`` file, a template or a built-in name, instead of the tokenizer's.

    Raises:
        TokenizerError: If there is no template, or it is broken.
    """
    template = find_chat_template(chat_template, tokenizer)
    if template is None:
        raise TokenizerError(
            "the model has no chat template: name one with chat_template, a .jinja file or "
            "chatml, or give a text instead of messages"
        )
    text = template.render([dict(m) for m in messages], add_generation_prompt=True).text
    turn_end = _turn_end(template, tokenizer)
    return EncodedPrompt(
        tokenizer.encode(text, add_special_tokens=False),
        tokenizer.eos_token_ids | turn_end,
        "" if turn_end else closing_text(template),
    )


def _turn_end(template: ChatTemplate, tokenizer: Tokenizer) -> set[int]:
    token = end_of_turn(template, tokenizer)
    return set() if token is None else {token}
