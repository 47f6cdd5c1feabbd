"""Where turns begin in a rendered conversation, as far as what is before them has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qlora_wgpu.data.chat import ChatTemplate
from qlora_wgpu.data.message_places import message_places
from qlora_wgpu.data.spans import Span
from qlora_wgpu.errors import DataError

Message = Mapping[str, Any]

_SENTINEL = "Qsentinel{}z"
_FEW_TURNS = 16


def begins_of_turns(
    template: ChatTemplate,
    messages: Sequence[Message],
    turns: Sequence[int],
    tools: Sequence[Mapping[str, Any]] | None,
    text: str,
    spans: Sequence[Span],
) -> list[int | None]:
    """Where what is marked of earlier turns has ended and that of a turn has not begun.

    Finding one takes time with the whole conversation; of many, those behind a message of the user
    are found at once.

    Args:
        template: The chat template, which marks the assistant's text.
        messages: The conversation.
        turns: The assistant's turns that are asked for, none of them the first message.
        tools: JSON schemas of functions that the model may call.
        text: The rendered conversation.
        spans: All that is marked in it.

    Returns:
        For each turn a place in the text, or None where it is not certain.
    """

    def render(exchanged: Sequence[Message]) -> str | None:
        try:
            return template.render(exchanged, tools=tools).text
        except DataError:
            return None

    is_long = len(turns) > _FEW_TURNS
    places = message_places(render, messages, text, unused(text)) if is_long else {}
    begins: list[int | None] = []
    for turn in turns:
        place = places.get(turn - 1)
        if place is None or messages[turn - 1]["role"] == "assistant":
            begins.append(_begin_of_turn(template, messages, turn, tools, text, spans))
        else:
            begins.append(place.end)
    return begins


def _begin_of_turn(
    template: ChatTemplate,
    messages: Sequence[Message],
    turn: int,
    tools: Sequence[Mapping[str, Any]] | None,
    text: str,
    spans: Sequence[Span],
) -> int | None:
    begin = end_by_omission(template, messages, turn, tools, text, spans)
    if begin is None and messages[turn - 1]["role"] != "assistant":
        begin = end_by_exchange(template, messages, turn, tools, text)
    return begin


def end_by_omission(
    template: ChatTemplate,
    messages: Sequence[Message],
    first: int,
    tools: Sequence[Mapping[str, Any]] | None,
    text: str,
    spans: Sequence[Span],
) -> int | None:
    """Where the text begins to differ from that of the messages before the first that counts.

    None where earlier turns differ, too: then that place says nothing.
    """
    try:
        without = template.render(messages[:first], tools=tools)
    except DataError:
        return None
    begin = common_prefix(without.text, text)
    earlier = without.spans or []
    same = list(spans[: len(earlier)]) == earlier and all(end <= begin for _, end in earlier)
    return begin if same else None


def end_by_exchange(
    template: ChatTemplate,
    messages: Sequence[Message],
    first: int,
    tools: Sequence[Mapping[str, Any]] | None,
    text: str,
) -> int | None:
    """Where the content of the message before the first that counts ends."""
    sentinel = unused(text)
    exchanged = _with_content(messages, first - 1, sentinel)
    try:
        whole = template.render(exchanged, tools=tools).text
    except DataError:
        return None
    _, _, tail = whole.rpartition(sentinel)
    if whole.count(sentinel) != 1 or not text.endswith(tail):
        return None
    return len(text) - len(tail)


def common_prefix(a: str, b: str) -> int:
    """The number of characters that two texts begin with alike."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def unused(text: str) -> str:
    """A word that a text does not hold."""
    return next(word for word in map(_SENTINEL.format, range(1 << 20)) if word not in text)


def _with_content(messages: Sequence[Message], index: int, text: str) -> list[Message]:
    """A conversation with another content of one message, in the form of its own."""
    message = messages[index]
    is_listed = isinstance(message.get("content"), list)
    content = [{"type": "text", "text": text}] if is_listed else text
    return [*messages[:index], {**message, "content": content}, *messages[index + 1 :]]
