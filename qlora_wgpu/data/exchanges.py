"""A turn with a word in place of its content, or of what it gives a function it calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from qlora_wgpu.data.spans import Span

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Exchange:
    """An exchanged turn.

    Attributes:
        message: The turn with the word in it.
        content: What the word stands for.
        exact: Whether templates write that as it is, instead of what they keep of it.
    """

    message: Message
    content: Any
    exact: bool = False

    def may_become(self, passage: str) -> bool:
        """Whether a passage of the text is the content, or what a template keeps of it."""
        content = self.content
        if self.exact:
            return bool(passage == content)
        if isinstance(content, list):
            content = "".join(str(p.get("text", "")) for p in content if isinstance(p, dict))
        if not isinstance(content, str):
            return not passage
        return passage.strip() in content if passage.strip() else not content.strip()


def exchanges(message: Message, word: str) -> Iterator[Exchange]:
    """A turn with a word in it, in the ways that may tell where it is.

    A turn that says nothing and calls a function has the word in place of an argument at first,
    since templates write other things around a content than around none.

    Args:
        message: The turn.
        word: The word.
    """
    content, calls = message.get("content"), message.get("tool_calls") or ()
    for number, call in enumerate(() if content else calls):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        given = function.get("arguments") if isinstance(function, Mapping) else None
        key = _text_argument(given)
        if key is None or not (isinstance(function, Mapping) and isinstance(given, Mapping)):
            continue
        changed = {**function, "arguments": {**given, key: word}}
        own = {**call, "function": changed} if "function" in call else changed
        others = [*calls[:number], own, *calls[number + 1 :]]
        yield Exchange({**message, "tool_calls": others}, given[key], exact=True)
        break
    other = [{"type": "text", "text": word}] if isinstance(content, list) else word
    yield Exchange({**message, "content": other}, content)


def holds_what_is_written(message: Message, text: str, span: Span) -> bool:
    """Whether a turn's thoughts and calls are within its span, as far as they are in the text once.

    Args:
        message: The turn.
        text: The rendered conversation.
        span: Where the turn is thought to be.
    """
    for written in _written(message):
        at = text.find(written)
        is_once = at >= 0 and text.find(written, at + 1) < 0
        if is_once and not (span[0] <= at and at + len(written) <= span[1]):
            return False
    return True


def _written(message: Message) -> Iterator[str]:
    for key in ("reasoning_content", "thinking", "reasoning"):
        if isinstance(message.get(key), str) and message[key].strip():
            yield message[key].strip()
    for call in message.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, Mapping) else None
        given = function.get("arguments") if isinstance(function, Mapping) else None
        if isinstance(given, Mapping):
            yield from (value for value in given.values() if isinstance(value, str) and value)


def _text_argument(given: Any) -> str | None:
    """The name of an argument that is text."""
    if not isinstance(given, Mapping):
        return None
    return next((k for k, v in given.items() if isinstance(v, str) and v.strip()), None)
