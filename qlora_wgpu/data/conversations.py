"""A conversation in its one form, and what its messages say of being learnt.

The process that renders it imports this module, and so nothing that takes long to start.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from types import MappingProxyType
from typing import Any, NamedTuple

from qlora_wgpu.errors import DataError, brief
from qlora_wgpu.visible import quoted

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None
Span = tuple[int, int]

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Names of what a message thinks; templates read the first, or the second."""
# What chat templates know; there are more, which one or another does.
USUAL_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython"})
_SHOWN_ROLES = 8  # in a message


class Conversation(NamedTuple):
    """A conversation."""

    messages: Sequence[Message]  # its messages
    tools: Tools = None  # the JSON schemas of functions that the model may call
    first: int = 0  # the first message that is no part of the prompt
    # What else the chat template is given, by name
    options: Mapping[str, Any] = MappingProxyType({})


def text_of(content: Any) -> str:
    """A content as text, that of its parts one after the other."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""


def roles_in_words(roles: Iterable[str]) -> str:
    """Some roles, as a sentence names them."""
    return ", ".join(map(quoted, sorted(roles)[:_SHOWN_ROLES]))


# ---- what messages say of being learnt -----------------------------------------------------------

WEIGHT = "weight"  # OpenAI's, of the assistant's messages
# Axolotl's, ms-swift's and LLaMA-Factory's, of anyone's.
_TRAINS = ("train", "training", "loss", "loss_weight")
_FLAGS = (WEIGHT, *_TRAINS)
_PARTS = ("train_detail", "training_detail")  # Axolotl's, of passages
FLAGS = frozenset({*_FLAGS, *_PARTS})
"""All keys of messages that say whether they are learnt."""
ASKS_FLAGS = re.compile(rf"(\.|\[['\"])({'|'.join(_FLAGS)})\b")
"""Finds where a template reads one of them."""


def is_spared(message: Mapping[str, Any]) -> bool:
    """Whether a message says that it is not learnt."""
    if FLAGS.isdisjoint(message):  # as most are
        return False
    return any(_says(message.get(flag), 0) for flag in _FLAGS)


def is_asked_for(message: Mapping[str, Any]) -> bool:
    """Whether a message says that it is learnt, whoever it is from.

    A weight of 1 does not say so: OpenAI's are of the assistant's messages alone.
    """
    if FLAGS.isdisjoint(message):
        return False
    return not is_spared(message) and any(_says(message.get(flag), 1) for flag in _TRAINS)


def flags_of(message: Mapping[str, Any]) -> dict[str, Any]:
    """What a message says of itself, by the words for it."""
    return {key: message[key] for key in (*_FLAGS, *_PARTS) if message.get(key) is not None}


def without_flags(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without what it says of itself."""
    return {key: value for key, value in message.items() if key not in FLAGS}


def check_flags(message: Mapping[str, Any], name: str) -> None:
    """Refuses what is neither learnt nor not; ``name`` is such as ``message 2``."""
    if FLAGS.isdisjoint(message):
        return
    for flag in _FLAGS:
        value = message.get(flag)
        if value is None or _says(value, 0) or _says(value, 1):
            continue
        if flag == WEIGHT:
            raise DataError(
                f"{name} has the weight {brief(value)}, but a turn is learnt (1) or not (0): "
                "data.columns: {weight: …} gives whole rows other weights"
            )
        raise DataError(f"{name} has {flag}: {brief(value)}, which must be true or false")
    parts = next((key for key in _PARTS if message.get(key)), None)
    if parts is not None and not is_spared(message):
        raise DataError(
            f"{name} has {parts}, but passages of a turn cannot be chosen: give the turn train: "
            "true or false in its place"
        )


def _says(value: Any, what: int) -> bool:
    return isinstance(value, Real) and bool(value == what)
