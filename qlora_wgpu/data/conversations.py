"""A conversation in its canonical form, its turns' flags, and its text by a chat template.

``messages.py`` makes the canonical form. What only some templates support (content parts, the role
``developer``, arguments as JSON text) is found out for each template by rendering trial messages.
The sandboxed process imports this module, so it imports nothing that is slow to load.
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
"""Keys of a message's reasoning; templates read the first or the second."""
# Roles that most chat templates support; some support others.
USUAL_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython"})
_SHOWN_ROLES = 8  # in an error


class Conversation(NamedTuple):
    """A conversation."""

    messages: Sequence[Message]
    tools: Tools = None  # the JSON schemas of functions that the model may call
    first: int = 0  # the first message after the prompt
    options: Mapping[str, Any] = MappingProxyType({})  # other variables of the chat template


def text_of(content: Any) -> str:
    """A message's content as text; parts are concatenated."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""


def roles_in_words(roles: Iterable[str]) -> str:
    """Roles as an error lists them."""
    return ", ".join(map(quoted, sorted(roles)[:_SHOWN_ROLES]))


# ---- flags of turns ------------------------------------------------------------------------------

WEIGHT = "weight"  # OpenAI's, for the assistant's messages
# Axolotl's, ms-swift's and LLaMA-Factory's, for messages of any role.
_TRAIN_FLAGS = ("train", "training", "loss", "loss_weight")
_TURN_FLAGS = (WEIGHT, *_TRAIN_FLAGS)
_DETAIL_FLAGS = ("train_detail", "training_detail")  # Axolotl's, for parts of a turn
FLAGS = frozenset({*_TURN_FLAGS, *_DETAIL_FLAGS})
"""All keys of messages that decide whether the loss is taken on them."""
READS_FLAGS = re.compile(rf"(\.|\[['\"])({'|'.join(_TURN_FLAGS)})\b")
"""Finds where a template reads one of them."""


def is_excluded(message: Mapping[str, Any]) -> bool:
    """Whether a message's flags exclude it from the loss."""
    return not FLAGS.isdisjoint(message) and any(
        _equals(message.get(flag), 0) for flag in _TURN_FLAGS
    )


def is_included(message: Mapping[str, Any]) -> bool:
    """Whether a message's flags include it in the loss, whatever its role.

    A weight of 1 does not: OpenAI's weights are for the assistant's messages only.
    """
    if FLAGS.isdisjoint(message) or is_excluded(message):
        return False
    return any(_equals(message.get(flag), 1) for flag in _TRAIN_FLAGS)


def flags_of(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message's flags that are not null."""
    flags = (*_TURN_FLAGS, *_DETAIL_FLAGS)
    return {key: message[key] for key in flags if message.get(key) is not None}


def without_flags(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without its flags."""
    return {key: value for key, value in message.items() if key not in FLAGS}


def check_flags(messages: Sequence[Message], name: str) -> None:
    """Refuses flags that are neither true nor false; ``name`` is such as ``message {}``."""
    for number, message in enumerate(messages, start=1):
        if FLAGS.isdisjoint(message):
            continue
        where = name.format(number)
        for flag in _TURN_FLAGS:
            value = message.get(flag)
            if value is None or _equals(value, 0) or _equals(value, 1):
                continue
            if flag == WEIGHT:
                raise DataError(
                    f"{where} has the weight {brief(value)}, but the weight of a turn must be 0 or "
                    "1: use data.columns: {weight: …} to weight whole rows"
                )
            raise DataError(f"{where} has {flag}: {brief(value)}, which must be true or false")
        detail = next((key for key in _DETAIL_FLAGS if message.get(key)), None)
        if detail is not None and not is_excluded(message):
            raise DataError(
                f"{where} has {detail}, which is not supported: set train: true or false for the "
                "whole turn"
            )


def _equals(value: Any, number: int) -> bool:
    return isinstance(value, Real) and bool(value == number)


# ---- rendered conversations ----------------------------------------------------------------------


class RenderedChat(NamedTuple):
    """A rendered conversation."""

    text: str
    # Character ranges within ``{% generation %}`` blocks; None if the template has no such blocks
    spans: list[Span] | None


def without_span_marks(value: Any) -> Any:
    """A copy of a JSON value without the characters that mark spans in rendered text."""
    if isinstance(value, str):
        return value.replace(SPAN_START, "\ufffd").replace(SPAN_END, "\ufffd")
    if isinstance(value, Mapping):
        return {without_span_marks(k): without_span_marks(item) for k, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_span_marks(item) for item in value]
    return value


# ---- what a template supports --------------------------------------------------------------------

_WORDS = ("Qtried0z", "Qtried1z")
_USER: Message = {"role": "user", "content": "?"}
_ANSWER: Message = {"role": "assistant", "content": "!"}
_WRITTEN_AS_LIST = re.compile(rf"['\"](?:text|k)['\"]: ?['\"]{_WORDS[0]}")
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
# Messages before and after one of a role, so that templates accept the conversation.
_AROUND: Mapping[str, tuple[list[Message], list[Message]]] = {
    "user": ([], [_ANSWER]),
    "assistant": ([_USER], []),
    "tool": ([_USER, _call(_OBJECT)], [_ANSWER]),
}


class Template:
    """A compiled template with its variables; it adapts messages to what the template supports."""

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        self.source = source
        self.marks_assistant = marks_assistant(source)  # has ``{% generation %}`` blocks
        self._variables = variables
        self._shown: dict[tuple[str, str], bool] = {}

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = False, tools: Tools = None
    ) -> RenderedChat:
        """Renders a conversation, with an assistant's header at the end on request."""
        given = [_with_reasoning(self._adapted(message)) for message in messages]
        text, spans = render(self.source, self._variables, given, tools, add_generation_prompt)
        return RenderedChat(text, spans if self.marks_assistant else None)

    def _tried(self, messages: Sequence[Message]) -> str | None:
        """The text of unadapted messages, or None if the template fails."""
        try:
            return render(self.source, self._variables, messages, None, False)[0]
        except QLoRAError:
            return None

    def _adapted(self, message: Message) -> dict[str, Any]:
        adapted: dict[str, Any] = {**message, "role": self._role(message.get("role"))}
        if content := message.get("content"):
            adapted["content"] = self._content(adapted["role"], content)
        if message.get("tool_calls") and self._expects_json_text:
            adapted["tool_calls"] = [_with_text(call) for call in message["tool_calls"]]
        return adapted

    def _role(self, role: Any) -> Any:
        if role == "developer" and "developer" not in self.source:
            return "system"
        has_tools = re.search(r"['\"]tool['\"]", self.source) is not None
        return "tool" if role == "function" and has_tools else role

    def _content(self, role: str, content: Any) -> Any:
        """Content as text, unless the template reads parts or supports nothing else."""
        if not isinstance(content, str | list):
            return content  # Jinja reports it
        if self._shows_form(role, "text" if isinstance(content, str) else "several parts"):
            return content
        text = text_of(content)
        if self._shows_form(role, "text") or not self._shows_form(role, "one part"):
            return text
        return [{"type": "text", "text": text}]

    def _shows_form(self, role: str, form: str) -> bool:
        """Whether the template prints content of this form in a message of this role."""
        if (role, form) not in self._shown:
            before, after = _AROUND.get(role, ([], [_USER, _ANSWER]))
            own = {**_RESULT, "role": role} if role == "tool" else {"role": role}
            tried = [*before, {**own, "content": _FORMS[form]}, *after]
            shows = _shows_words(self._tried(tried))
            if not shows and form != "text":  # some support only parts, in all messages
                others = [
                    {**each, "content": [{"type": "text", "text": each["content"]}]}
                    if isinstance(each["content"], str) else each
                    for each in tried
                ]  # fmt: skip
                shows = _shows_words(self._tried(others))
            self._shown[role, form] = shows
        return self._shown[role, form]

    @cached_property
    def _expects_json_text(self) -> bool:
        """Whether arguments must be JSON text: an object fails, or is printed as Python's dict."""
        text = self._tried([_USER, _call(_OBJECT), _RESULT, _ANSWER])
        if text is not None and _WORDS[0] in text and "{'k'" not in text:
            return False
        text = self._tried([_USER, _call(_TEXT), _RESULT, _ANSWER])
        return text is not None and _TEXT in text


def _shows_words(text: str | None) -> bool:
    has_words = text is not None and all(word in text for word in _WORDS)
    return has_words and text is not None and _WRITTEN_AS_LIST.search(text) is None


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
