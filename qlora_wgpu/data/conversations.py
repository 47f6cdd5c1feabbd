"""A conversation in its canonical form, and as the text of a chat template.

The process that renders it imports this module, and so nothing that takes long to start.

Conversations come in one form (``messages.py``). What only some templates know (parts of
a content, the role ``developer``, arguments as text) is decided for each by trying.

Templates of strangers are rendered in a process of its own, which imports this module, and so
nothing that takes long to start.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from numbers import Real
from types import MappingProxyType
from typing import Any, NamedTuple

from qlora_wgpu.errors import DataError, QLoRAError, brief
from qlora_wgpu.sandbox.templates import SPAN_END, SPAN_START, marks_assistant, render
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


# ---- texts ---------------------------------------------------------------------------------------


class RenderedChat(NamedTuple):
    """A rendered conversation."""

    text: str  # the text that the model reads
    # Half-open character ranges of what the assistant writes, or None where the template does not
    # mark it with ``{% generation %}``
    spans: list[Span] | None


def without_span_marks(value: Any) -> Any:
    """A copy of JSON values without the marks that only the sandbox may set."""
    if isinstance(value, str):
        return value.replace(SPAN_START, "\ufffd").replace(SPAN_END, "\ufffd")
    if isinstance(value, Mapping):
        return {without_span_marks(k): without_span_marks(item) for k, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_span_marks(item) for item in value]
    return value


# ---- what a template wants -----------------------------------------------------------------------

_WORDS = ("Qtried0z", "Qtried1z")
_USER: Message = {"role": "user", "content": "?"}
_ANSWER: Message = {"role": "assistant", "content": "!"}
_AS_IT_IS = re.compile(rf"['\"](?:text|k)['\"]: ?['\"]{_WORDS[0]}")
_OBJECT, _TEXT = {"k": _WORDS[0]}, json.dumps({"k": _WORDS[0]})


def _call(arguments: Any) -> Message:
    function = {"name": "f", "arguments": arguments}
    call = {"id": "abcdefgh1", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


_RESULT: Message = {"role": "tool", "name": "f", "tool_call_id": "abcdefgh1", "content": "!"}
_FORMS: Mapping[str, Any] = {
    "text": "".join(_WORDS),
    "one part": [{"type": "text", "text": "".join(_WORDS)}],
    "several parts": [{"type": "text", "text": word} for word in _WORDS],
}
# What a message of a role stands between, so that a template takes it.
_AROUND: Mapping[str, tuple[list[Message], list[Message]]] = {
    "user": ([], [_ANSWER]),
    "assistant": ([_USER], []),
    "tool": ([_USER, _call(_OBJECT)], [_ANSWER]),
}


class Template:
    """A compiled template with the variables it is given besides; finds out what it wants once.

    Attributes:
        source: The template's Jinja source.
        marks_assistant: Whether it has ``{% generation %}`` blocks.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        """Compiles it."""
        self.source = source
        self.marks_assistant = marks_assistant(source)
        self._variables = variables
        self._shown: dict[tuple[str, str], bool] = {}

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = False, tools: Tools = None
    ) -> RenderedChat:
        """Renders a conversation.

        With ``add_generation_prompt`` it ends with the header of an assistant's turn.
        """
        given = [_with_reasoning(self._adapted(message)) for message in messages]
        text, spans = render(self.source, self._variables, given, tools, add_generation_prompt)
        return RenderedChat(text, spans if self.marks_assistant else None)

    def _tried(self, messages: Sequence[Message]) -> str | None:
        """The text of messages as they are, or None where the template refuses them."""
        try:
            return render(self.source, self._variables, messages, None, False)[0]
        except QLoRAError:
            return None

    def _adapted(self, message: Message) -> dict[str, Any]:
        """A message as the template wants it."""
        adapted: dict[str, Any] = {**message, "role": self._role(message.get("role"))}
        if content := message.get("content"):
            adapted["content"] = self._content(adapted["role"], content)
        if message.get("tool_calls") and self._wants_text:
            adapted["tool_calls"] = [_with_text(call) for call in message["tool_calls"]]
        return adapted

    def _role(self, role: Any) -> Any:
        if role == "developer" and "developer" not in self.source:
            return "system"
        return "tool" if role == "function" and self._knows_tools else role

    @cached_property
    def _knows_tools(self) -> bool:
        return re.search(r"['\"]tool['\"]", self.source) is not None

    def _content(self, role: str, content: Any) -> Any:
        """A content as text, unless the template walks over parts, or takes nothing else."""
        if not isinstance(content, str | list):
            return content  # which Jinja tells of
        if self._shows_form(role, "text" if isinstance(content, str) else "several parts"):
            return content
        text = text_of(content)
        if self._shows_form(role, "text") or not self._shows_form(role, "one part"):
            return text
        return [{"type": "text", "text": text}]

    def _shows_form(self, role: str, form: str) -> bool:
        """Whether the template writes contents of a role in a form."""
        if (role, form) not in self._shown:
            before, after = _AROUND.get(role, ([], [_USER, _ANSWER]))
            own = {**_RESULT, "role": role} if role == "tool" else {"role": role}
            tried = [*before, {**own, "content": _FORMS[form]}, *after]
            shows = _shows_words(self._tried(tried))
            if not shows and form != "text":  # some take nothing but parts, of anyone
                others = [{**each, "content": _in_parts(each["content"])} for each in tried]
                shows = _shows_words(self._tried(others))
            self._shown[role, form] = shows
        return self._shown[role, form]

    @cached_property
    def _wants_text(self) -> bool:
        """Whether arguments are to be JSON's text: an object fails, or stands there as Python's."""
        text = self._tried([_USER, _call(_OBJECT), _RESULT, _ANSWER])
        if text is not None and _WORDS[0] in text and "{'k'" not in text:
            return False
        text = self._tried([_USER, _call(_TEXT), _RESULT, _ANSWER])
        return text is not None and _TEXT in text


def _shows_words(text: str | None) -> bool:
    """Whether a text has the words, and not their list as Python or JSON would write it."""
    has_words = text is not None and all(word in text for word in _WORDS)
    return has_words and text is not None and _AS_IT_IS.search(text) is None


def _in_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function: Any = call.get("function")
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(arguments, Mapping):
        return dict(call)
    text = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[key] for key in REASONING_KEYS if message.get(key)), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}
