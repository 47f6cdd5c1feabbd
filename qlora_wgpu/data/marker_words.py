"""Marker words in every part of a conversation, to locate the parts and to find omitted ones.

A template renders the same text around other words. So the rendering of a conversation with marker
words tells where each part is in the original rendering, provided that replacing the markers by the
original words gives exactly that.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from qlora_wgpu.data.conversations import (
    REASONING_KEYS,
    Conversation,
    Message,
    Span,
    Template,
    Tools,
)
from qlora_wgpu.errors import DataError
from qlora_wgpu.visible import quoted

# ---- conversations with markers ------------------------------------------------------------------

TOOLS = -1  # in place of a message's index, for parts of the tools

_UNUSED = "Qsentinel{}z"
_WORD = re.compile(r"<[^<>\n]*>|\[/?[A-Z_]+\]|(\w+)")  # templates look for tags
_THOUGHT = re.compile(r"(<think>.*?</think>|^(?:(?!<think>).)*?</think>)", re.DOTALL)
_NUMBER = 7_130_000_000  # markers in place of numbers begin here


class Part(NamedTuple):
    """A part of a message or of the tools."""

    message: int  # the message's index, or ``TOOLS``
    kind: str  # ``content``, ``thought``, ``call`` or ``tool``


class ContentSpan(NamedTuple):
    """The place of a message's content in the text."""

    start: int
    end: int
    after_marker: int  # the end of the substituted word
    number: int  # the marker's


class _Mark(NamedTuple):
    """What a marker replaces: a passage, with the text around it in its value."""

    part: Part
    passage: str
    before: str
    after: str


@dataclass
class MarkedConversation:
    """A conversation with marker words."""

    text: str  # the original rendering
    messages: list[Message]
    tools: Tools = None
    # The message whose whole content is substituted, if any; templates may then strip the original
    whole: int | None = None
    _marks: list[_Mark] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._word = make_sentinel(self.text)
        self._base = next(n for n in range(_NUMBER, 10**10, 10**6) if str(n)[:4] not in self.text)
        stem = str(self._base)[:4]
        self._pattern = re.compile(rf"{self._word}x(\d+)y|{stem}(\d{{6}})(?:\.5)?")

    @property
    def parts(self) -> set[Part]:
        """All parts that have a marker."""
        return {mark.part for mark in self._marks}

    def found(self, marked: str) -> Iterator[tuple[int, Span]]:
        """Yields the numbers and positions of the markers in a text."""
        for match in self._pattern.finditer(marked):
            yield int(match[1] or match[2]), match.span()

    def left_out(self, marked: str) -> set[Part]:
        """The parts of which a text has no marker."""
        return self.parts - {self._marks[number].part for number, _ in self.found(marked)}

    def places(self, marked: str | None) -> dict[int, list[ContentSpan]]:
        """Where messages' contents are in the original rendering, by message, in order.

        Empty if the template refuses the marked conversation (None) or renders it differently.
        """
        if marked is None:
            return {}
        for form in (str, str.strip, str.lstrip, str.rstrip):
            found = self._places(marked, form)
            if found is not None or self.whole is None:
                return found or {}
        return {}

    def _places(self, marked: str, form: Any) -> dict[int, list[ContentSpan]] | None:
        text, end, at = self.text, 0, 0
        places: dict[int, list[ContentSpan]] = defaultdict(list)
        seen = set()
        for number, (start, stop) in self.found(marked):
            mark = self._marks[number]
            passage = form(mark.passage)
            written = marked[end:start] + passage
            if not text.startswith(written, at):
                return None
            at, end = at + len(written), stop
            if number not in seen:  # a name may be repeated with the tool's result
                seen.add(number)
                start = at - len(passage)
                start -= self._kept(mark.before, start, ends=True)
                place = ContentSpan(start, at + self._kept(mark.after, at), at, number)
                places[mark.part.message].append(place)
        return dict(places) if text[at:] == marked[end:] else None

    def _kept(self, around: str, at: int, *, ends: bool = False) -> int:
        """How many characters around a marker in its value are in the text, too."""
        text = self.text
        if ends:
            forms = (around, around.lstrip())
            return next((len(f) for f in forms if text.endswith(f, 0, at)), 0)
        return next((len(f) for f in (around, around.rstrip()) if text.startswith(f, at)), 0)

    # -- setting markers -----------------------------------------------------------------------

    def mark(self, number: int) -> None:
        """Puts markers into a message."""
        message = dict(self.messages[number])
        if content := message.get("content"):
            message["content"] = self._content(content, number)
        for key in REASONING_KEYS:
            if isinstance(message.get(key), str):
                message[key] = self._text(message[key], Part(number, "thought"))
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [self._call(call, Part(number, "call")) for call in calls]
        self.messages[number] = message

    def mark_content(self, number: int, content: str) -> None:
        """Substitutes the whole content of a message."""
        message, self.whole = self.messages[number], number
        mark = self._new(Part(number, "content"), content)
        is_listed = isinstance(message.get("content"), list)
        other = [{"type": "text", "text": mark}] if is_listed else mark
        self.messages[number] = {**message, "content": other}

    def mark_tools(self) -> None:
        """Puts a marker into the name and the description of each tool."""
        self.tools = [self._tool(tool) for tool in self.tools or ()]

    def _tool(self, tool: Mapping[str, Any]) -> Mapping[str, Any]:
        function = tool.get("function")
        if not isinstance(function, Mapping):
            return tool
        named = {k: function[k] for k in ("name", "description") if function.get(k)}
        marked = {k: self._new(Part(TOOLS, "tool"), str(value)) for k, value in named.items()}
        return {**tool, "function": {**function, **marked}}

    def _content(self, content: Any, number: int) -> Any:
        if isinstance(content, list):
            return [
                {**part, "text": self._content(part["text"], number)}
                if isinstance(part, Mapping) and isinstance(part.get("text"), str)
                else part
                for part in content
            ]
        if not isinstance(content, str):
            return content
        if self.messages[number]["role"] != "assistant" or "</think>" not in content:
            return self._text(content, Part(number, "content"))
        pieces = enumerate(_THOUGHT.split(content))
        kinds = ("content", "thought")
        return "".join(self._text(piece, Part(number, kinds[i % 2])) for i, piece in pieces)

    def _call(self, call: Any, part: Part) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            return call
        before = len(self._marks)
        changed = {**function, "arguments": self._value(function.get("arguments"), part)}
        if len(self._marks) == before and isinstance(function.get("name"), str):
            changed["name"] = self._new(part, function["name"])
        return {**call, "function": changed}

    def _value(self, value: Any, part: Part) -> Any:
        if isinstance(value, str):
            return self._text(value, part)
        if isinstance(value, Mapping):
            return {key: self._value(item, part) for key, item in value.items()}
        if isinstance(value, list):
            return [self._value(item, part) for item in value]
        if isinstance(value, bool) or not isinstance(value, int | float):
            return value
        number = len(self._marks) + self._base
        self._new(part, str(value))
        return number if isinstance(value, int) else number + 0.5

    def _text(self, text: str, part: Part) -> str:
        """Substitutes the first and the last word of a text; without words, all of it."""
        words = [match.span() for match in _WORD.finditer(text) if match[1]]
        if not words:
            bare = text.strip()
            if not bare:
                return text
            start = text.index(bare)
            words = [(start, start + len(bare))]
        marked, end = "", 0
        for start, stop in dict.fromkeys((words[0], words[-1])):
            around = text[:start], text[stop:]
            marked += text[end:start] + self._new(part, text[start:stop], *around)
            end = stop
        return marked + text[end:]

    def _new(self, part: Part, passage: str, before: str = "", after: str = "") -> str:
        self._marks.append(_Mark(part, passage, before, after))
        return f"{self._word}x{len(self._marks) - 1}y"


def common_prefix(a: str, b: str) -> int:
    """The length of the common prefix of two texts."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def make_sentinel(text: str) -> str:
    """A word that does not occur in a text."""
    return next(word for word in map(_UNUSED.format, range(1 << 20)) if word not in text)


# ---- omitted content -----------------------------------------------------------------------------

_KINDS = {"thought": "thoughts", "call": "tool calls", "tool": "the tools"}
ANSWERS = frozenset({*_KINDS.values(), "messages of the role 'assistant'"})
"""What templates omit from earlier turns by design, and tools."""
_MAX_SHAPES = 4096  # in the cache


class LeftOut:
    """Finds what a template omits, by rendering markers in one conversation of each shape."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self._known: dict[Any, tuple[Set[Part], Set[Part]]] = {}

    def of(self, conversation: Conversation, text: str, trained: Set[int]) -> frozenset[str]:
        """Names the omitted parts; it is an error if a trained turn is omitted entirely."""
        messages = conversation.messages
        shape = (tuple(map(_shape, messages)), bool(conversation.tools))
        if shape not in self._known:
            if len(self._known) >= _MAX_SHAPES:
                self._known.clear()
            self._known[shape] = self._parts(conversation, text)
        parts, left_out = self._known[shape]
        for number in sorted({part.message for part in left_out} & trained):
            own = {part for part in parts if part.message == number}
            if own <= left_out:
                names = {"thought": "thought", "call": "tool call"}
                kinds = " and ".join(sorted({names.get(part.kind, "content") for part in own}))
                raise DataError(
                    f"message {number + 1} is trained on, but the chat template omits its {kinds}, "
                    "and it has no other content: use another data.chat_template"
                )
        return frozenset(_in_words(part, messages) for part in left_out)

    def _parts(self, conversation: Conversation, text: str) -> tuple[Set[Part], Set[Part]]:
        """All parts of a conversation, and the omitted ones."""
        marked = MarkedConversation(text, list(conversation.messages), conversation.tools)
        for number in range(len(marked.messages)):
            marked.mark(number)
        marked.mark_tools()
        try:
            whole = self._template.render(marked.messages, tools=marked.tools or None).text
        except DataError:  # the template depends on the substituted words
            return frozenset(), frozenset()
        return marked.parts, marked.left_out(whole)


def _shape(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """What decides which parts a message has."""
    content = message.get("content")
    return (
        message["role"],
        tuple(key for key, value in message.items() if value),
        isinstance(content, str) and bool(content.strip()),
        isinstance(content, str) and "</think>" in content,
    )


def _in_words(part: Part, messages: Any) -> str:
    if part.kind in _KINDS:
        return _KINDS[part.kind]
    role = messages[part.message]["role"]
    return "the system message" if role == "system" else f"messages of the role {quoted(role)}"
