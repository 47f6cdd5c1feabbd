"""Where the contents of a conversation's messages stand in its text, from a single rendering more.

Each content is exchanged for a word of its own, all at once. What stands between those words is the
template's; where the text is made of the same pieces with the contents between them, it is known
where each content stands, and what a template has written around it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

_EXCHANGED = ("user", "assistant")  # templates put a system message wherever they like


@dataclass(frozen=True)
class Place:
    """Where a message's content stands.

    Attributes:
        start: Its first character.
        end: The character after its last one.
        before: What the template wrote between the content before it and this one.
        after: What the template wrote between this content and the next one.
    """

    start: int
    end: int
    before: str
    after: str


def message_places(
    render: Callable[[Sequence[Mapping[str, Any]]], str | None],
    messages: Sequence[Mapping[str, Any]],
    text: str,
    word: str,
) -> dict[int, Place]:
    """The places of contents by the numbers of their messages; none where they are not certain.

    Args:
        render: Gives the text of messages, or None where the template refuses them.
        messages: The conversation.
        text: Its text.
        word: A word that the text does not hold.
    """
    numbers = [i for i, message in enumerate(messages) if _is_exchanged(message)]
    exchanged = list(messages)
    for i in numbers:
        exchanged[i] = {**messages[i], "content": f"{word}x{i}y"}
    whole = render(exchanged)
    if whole is None or not numbers:
        return {}
    pieces = re.split(rf"{word}x(\d+)y", whole)
    if [int(number) for number in pieces[1::2]] != numbers:
        return {}
    written = pieces[::2]
    contents = [str(messages[i]["content"]) for i in numbers]
    spans = list(_walk(text, written, contents))
    if len(spans) < len(contents) or spans[-1][1] + len(written[-1]) != len(text):
        return {}
    around = pairwise(written)
    return {
        number: Place(*span, *texts)
        for number, span, texts in zip(numbers, spans, around, strict=True)
    }


def _is_exchanged(message: Mapping[str, Any]) -> bool:
    return message["role"] in _EXCHANGED and isinstance(message.get("content"), str)


def _walk(text: str, written: Sequence[str], contents: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yields the spans of contents in a text, as far as it is made of them and of these pieces."""
    start = len(written[0])
    if not text.startswith(written[0]):
        return
    for content, after in zip(contents, written[1:], strict=True):
        forms = (content, content.strip(), content.lstrip(), content.rstrip())
        ends = (start + len(form) for form in forms if text.startswith(form, start))
        end = next((end for end in ends if after and text.startswith(after, end)), None)
        if end is None:
            return
        yield start, end
        start = end + len(after)
