"""What messages say of themselves: whether they are learnt, in the words of other trainers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np

from qlora_wgpu.data.chat import ChatTemplate
from qlora_wgpu.errors import DataError, brief

WEIGHT = "weight"  # OpenAI's, of the assistant's messages
# Axolotl's, ms-swift's and LLaMA-Factory's, of anyone's.
_TRAINS = ("train", "training", "loss", "loss_weight")
_MARKS = (WEIGHT, *_TRAINS)
_PARTS = ("train_detail", "training_detail")  # Axolotl's, of passages
MARKS = frozenset({*_MARKS, *_PARTS})
"""All keys of messages that say whether they are learnt."""
_ASKS = re.compile(rf"(\.|\[['\"])({'|'.join(_MARKS)})\b")


def decides(template: ChatTemplate) -> bool:
    """Whether a template marks what is learnt by what messages say, and so knows better."""
    return template.marks_assistant and _ASKS.search(template.source) is not None


def is_spared(message: Mapping[str, Any]) -> bool:
    """Whether a message says that it is not learnt."""
    if MARKS.isdisjoint(message):  # as most are
        return False
    return any(_says(message.get(mark), 0) for mark in _MARKS)


def is_asked_for(message: Mapping[str, Any]) -> bool:
    """Whether a message says that it is learnt, whoever it is from.

    A weight of 1 does not say so: OpenAI's are of the assistant's messages alone.
    """
    if MARKS.isdisjoint(message):
        return False
    return not is_spared(message) and any(_says(message.get(mark), 1) for mark in _TRAINS)


def marks_of(message: Mapping[str, Any]) -> dict[str, Any]:
    """What a message says of itself, by the words for it."""
    return {key: message[key] for key in (*_MARKS, *_PARTS) if message.get(key) is not None}


def without_marks(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without what it says of itself."""
    return {key: value for key, value in message.items() if key not in MARKS}


def check_marks(message: Mapping[str, Any], name: str) -> None:
    """Refuses what is neither learnt nor not.

    Args:
        message: The message.
        name: What it is called in the error, such as ``message 2``.

    Raises:
        DataError: If a mark is neither 0 nor 1, or passages of the message are marked.
    """
    if MARKS.isdisjoint(message):
        return
    for mark in _MARKS:
        value = message.get(mark)
        if value is None or _says(value, 0) or _says(value, 1):
            continue
        if mark == WEIGHT:
            raise DataError(
                f"{name} has the weight {brief(value)}, but a turn is learnt (1) or not (0): "
                "data.columns: {weight: …} gives whole rows other weights"
            )
        raise DataError(f"{name} has {mark}: {brief(value)}, which must be true or false")
    parts = next((key for key in _PARTS if message.get(key)), None)
    if parts is not None and not is_spared(message):
        raise DataError(
            f"{name} has {parts}, but passages of a turn cannot be chosen: give the turn train: "
            "true or false in its place"
        )


def _says(value: Any, what: int) -> bool:
    return isinstance(value, Real | np.bool_) and bool(value == what)
