"""A word of its own in every part of a conversation: where a template has it, what it leaves out.

A template that is given other words writes the same around them. So the text of a conversation with
marker words tells where each part stands in the conversation's own text: for certain, where that
text is the marked one with the words put back.
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

# ---- conversations with marks --------------------------------------------------------------------

TOOLS = -1
"""In place of a message's number, what the tools' parts belong to."""

_UNUSED = "Qsentinel{}z"
_WORD = re.compile(r"<[^<>\n]*>|\[/?[A-Z_]+\]|(\w+)")  # tags are what templates look for
_THOUGHT = re.compile(r"(<think>.*?</think>|^(?:(?!<think>).)*?</think>)", re.DOTALL)
_NUMBER = 7_130_000_000  # and up are marks in place of numbers


class Part(NamedTuple):
    """What a message, or the tools, consist of."""

    message: int  # the message's number from 0, or ``TOOLS``
    kind: str  # what it is: ``content``, ``thought``, ``call`` or ``tool``


class ContentSpan(NamedTuple):
    """Where something that a message says stands in the text."""

    start: int  # its first character
    end: int  # the character after its last one
    behind: int  # the character after the word that is exchanged
    number: int  # the word's


class _Mark(NamedTuple):
    """What a mark stands for: the passage, and what its value has around it."""

    part: Part
    passage: str
    before: str
    after: str


@dataclass
class MarkedConversation:
    """A conversation with marks in it."""

    text: str
    messages: list[Message]  # the messages
    tools: Tools = None  # the tools, marked or not
    # The message whose content is exchanged as a whole, if one's is; then a template need not keep
    # all of it
    whole: int | None = None
    _marks: list[_Mark] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._word = make_sentinel(self.text)
        self._base = next(n for n in range(_NUMBER, 10**10, 10**6) if str(n)[:4] not in self.text)
        stem = str(self._base)[:4]
        self._pattern = re.compile(rf"{self._word}x(\d+)y|{stem}(\d{{6}})(?:\.5)?")

    @property
    def parts(self) -> set[Part]:
        """All that have a mark."""
        return {mark.part for mark in self._marks}

    def found(self, marked: str) -> Iterator[tuple[int, Span]]:
        """Yields the numbers of marks in a text, and where they stand."""
        for match in self._pattern.finditer(marked):
            yield int(match[1] or match[2]), match.span()

    def left_out(self, marked: str) -> set[Part]:
        """The parts that a text has no mark of."""
        return self.parts - {self._marks[number].part for number, _ in self.found(marked)}

    def places(self, marked: str | None) -> dict[int, list[ContentSpan]]:
        """Where the parts of messages stand in the conversation's own text, in order.

        Nowhere where the template refuses the marked ones.
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
            if number not in seen:  # such as a name that is written once more with the result
                seen.add(number)
                start = at - len(passage)
                start -= self._kept(mark.before, start, ends=True)
                place = ContentSpan(start, at + self._kept(mark.after, at), at, number)
                places[mark.part.message].append(place)
        return dict(places) if text[at:] == marked[end:] else None

    def _kept(self, around: str, at: int, *, ends: bool = False) -> int:
        """How much of what stands around a mark in its value stands in the text, too."""
        text = self.text
        if ends:
            forms = (around, around.lstrip())
            return next((len(f) for f in forms if text.endswith(f, 0, at)), 0)
        return next((len(f) for f in (around, around.rstrip()) if text.startswith(f, at)), 0)

    # -- marking -------------------------------------------------------------------------------

    def mark(self, number: int) -> None:
        """Puts marks into a message."""
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
        """Exchanges a message's content as a whole."""
        message, self.whole = self.messages[number], number
        mark = self._new(Part(number, "content"), content)
        is_listed = isinstance(message.get("content"), list)
        other = [{"type": "text", "text": mark}] if is_listed else mark
        self.messages[number] = {**message, "content": other}

    def mark_tools(self) -> None:
        """Puts a mark into the name and the description of each tool."""
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
        number = int(self._number_of(self._new(part, str(value)))) + self._base
        return number if isinstance(value, int) else number + 0.5

    def _number_of(self, mark: str) -> str:
        return mark.removeprefix(f"{self._word}x").removesuffix("y")

    def _text(self, text: str, part: Part) -> str:
        """A text with its first word and its last one exchanged; without words all of it."""
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
    """The number of characters that two texts begin with alike."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def make_sentinel(text: str) -> str:
    """A word that a text does not hold."""
    return next(word for word in map(_UNUSED.format, range(1 << 20)) if word not in text)


# ---- what a template leaves out ------------------------------------------------------------------

_KINDS = {"thought": "thoughts", "call": "tool calls", "tool": "the tools"}
ANSWERS = frozenset({*_KINDS.values(), "messages of the role 'assistant'"})
"""What templates leave out of earlier answers by design, and of tools."""
_MOST_SHAPES = 4096  # that are remembered


class LeftOut:
    """Finds what a template leaves out: that of which a word of its own is not in the text.

    Which parts a template leaves out follows from which there are, so that of conversations of one
    shape one is looked at.
    """

    def __init__(self, template: Template) -> None:
        """Has looked at none."""
        self._template = template
        self._known: dict[Any, tuple[Set[Part], Set[Part]]] = {}

    def of(self, conversation: Conversation, text: str, learnt: Set[int]) -> frozenset[str]:
        """What of a conversation is left out, in words."""
        messages = conversation.messages
        shape = (tuple(map(_shape, messages)), bool(conversation.tools))
        if shape not in self._known:
            if len(self._known) >= _MOST_SHAPES:
                self._known.clear()
            self._known[shape] = self._parts(conversation, text)
        parts, left_out = self._known[shape]
        for number in sorted({part.message for part in left_out} & learnt):
            own = {part for part in parts if part.message == number}
            if own <= left_out:
                kinds = " and ".join(sorted({_says(part) for part in own}))
                raise DataError(
                    f"message {number + 1} is learnt, but the chat template leaves its {kinds} "
                    "out, and nothing else is in it: use another data.chat_template"
                )
        return frozenset(_in_words(part, messages) for part in left_out)

    def _parts(self, conversation: Conversation, text: str) -> tuple[Set[Part], Set[Part]]:
        """All parts of a conversation, and those that are left out."""
        marked = MarkedConversation(text, list(conversation.messages), conversation.tools)
        for number in range(len(marked.messages)):
            marked.mark(number)
        marked.mark_tools()
        try:
            whole = self._template.render(marked.messages, tools=marked.tools or None).text
        except DataError:  # which goes by what is exchanged
            return frozenset(), frozenset()
        return marked.parts, marked.left_out(whole)


def _shape(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """What of a message decides which parts it has."""
    content = message.get("content")
    return (
        message["role"],
        tuple(key for key, value in message.items() if value),
        isinstance(content, str) and bool(content.strip()),
        isinstance(content, str) and "</think>" in content,
    )


def _says(part: Part) -> str:
    return {"thought": "thought", "call": "tool call"}.get(part.kind, "content")


def _in_words(part: Part, messages: Any) -> str:
    if part.kind in _KINDS:
        return _KINDS[part.kind]
    role = messages[part.message]["role"]
    return "the system message" if role == "system" else f"messages of the role {quoted(role)}"
