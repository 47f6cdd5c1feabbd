"""The one form of conversations, whatever form they came in, and what templates want of it.

Rows, requests and prompts come here first: what is null is absent, calls of functions are
``tool_calls`` with an object of arguments, tools are wrapped. What only some templates know (parts
of a content, the role ``developer``, arguments as text) is decided for each by trying.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from qlora_wgpu.data.columns import EmptyRow
from qlora_wgpu.data.json_rows import parse_json
from qlora_wgpu.errors import DataError
from qlora_wgpu.visible import quoted

Message = Mapping[str, Any]

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Names of what a message thinks; templates read the first, or the second."""

_NO_OPTIONS = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
     "chat_template", "tokenize", "padding", "truncation", "max_length", "return_tensors",
     "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"}
)  # fmt: skip
_PLAIN_CALL = "function_call"  # OpenAI's older key


def without_nulls(value: Any) -> Any:
    """A JSON value whose objects have no nulls: tables fill keys that one lacks with them."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def canonical_message(given: Any, name: str) -> dict[str, Any]:
    """A message in the one form.

    Args:
        given: The message.
        name: What it is called in an error, such as ``message 2``.
    """
    if not isinstance(given, Mapping):
        raise DataError(f"{name} must be an object, got {kind_of(given)}")
    message: dict[str, Any] = without_nulls(given)
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise DataError(f"{name} needs a 'role' such as 'user' or 'assistant'")
    calls = from_json(message.pop("tool_calls", None))
    plain = message.pop(_PLAIN_CALL, None)
    if calls in (None, [], "") and plain not in (None, {}, ""):
        calls = [from_json(plain, "{")]
    if calls not in (None, [], ""):
        if not isinstance(calls, list):
            raise DataError(f"{name} needs 'tool_calls' as a list, got {kind_of(calls)}")
        message["tool_calls"] = [_canonical_call(call, name) for call in calls]
    if "content" not in message:
        if not calls and not any(message.get(key) for key in REASONING_KEYS):
            if "content" in given:
                raise EmptyRow(f"{name} has nothing as its content")
            raise DataError(f"{name} needs 'content' as text, got nothing")
        message["content"] = ""
    _check_content(message["content"], name)
    return message


def _canonical_call(call: Any, name: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"{name} has a tool call that is no object with the 'name' of a function")
    arguments = function.get("arguments", function.get("parameters"))
    known = {key: value for key, value in function.items() if key != "parameters"}
    own = {key: value for key, value in call.items() if key != "function"}
    if function is call:  # the function's keys and the call's in one
        own = {key: known.pop(key) for key in ("id", "type") if key in known}
    return {"type": "function", **own, "function": {**known, "arguments": _object(arguments)}}


def _object(arguments: Any) -> Any:
    """Arguments as an object; what models write as text need not be one, and stays as it is.

    A null within the text is somebody's; one within an object may be a table's, and is gone.
    """
    if isinstance(arguments, str) and arguments.strip():
        try:
            parsed = parse_json(arguments)
        except DataError:
            return arguments
        return parsed if isinstance(parsed, dict) else arguments
    return arguments if isinstance(arguments, Mapping) or arguments else {}


def _check_content(content: Any, name: str) -> None:
    if isinstance(content, str):
        return
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        for part in content:
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise DataError(
                    f"{name} holds a part of type {quoted(part.get('type'))}: only text is read"
                )
        return
    raise DataError(f"{name} needs 'content' as text, got {kind_of(content)}")


def canonical_tools(value: Any) -> list[dict[str, Any]] | None:
    """Tools in the one form, each an object with its ``function``; None where there are none."""
    tools = from_json(value)
    if tools is None or tools == [] or (isinstance(tools, str) and tools.strip() in ("", "null")):
        return None
    if not isinstance(tools, list | tuple):
        raise DataError("'tools' must be a list of objects")
    return [_canonical_tool(from_json(tool, "{")) for tool in tools]


def _canonical_tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise DataError("'tools' must be a list of objects")
    tool = without_nulls(tool)
    is_bare = "name" in tool and "function" not in tool
    named = {key: value for key, value in tool.items() if key != "type"}
    return {"type": "function", "function": named} if is_bare else dict(tool)


def canonical_options(value: Any) -> dict[str, Any]:
    """What a row gives the chat template besides, as TRL's ``chat_template_kwargs``."""
    options = from_json(value, "{")
    if options is None or options == "":
        return {}
    if not isinstance(options, Mapping):
        raise DataError(f"'chat_template_kwargs' must be an object, got {kind_of(options)}")
    taken = sorted(_NO_OPTIONS & options.keys())
    if taken:
        raise DataError(
            f"'chat_template_kwargs' has {quoted(taken[0])}, which is not the chat template's to "
            "read here: leave it out"
        )
    return dict(without_nulls(options))


def from_json(value: Any, opener: str = "[") -> Any:
    """A list, or an object, that a table keeps as text."""
    if isinstance(value, str) and value.lstrip().startswith(opener):
        what = "a list" if opener == "[" else "an object"
        try:
            return parse_json(value)
        except DataError as err:
            raise DataError(f"{what} kept as text is {err}") from err
    return value


def kind_of(value: Any) -> str:
    """The kind of a JSON value, in words."""
    names = {dict: "an object", list: "a list", bool: "a truth value", type(None): "nothing",
             bytes: "bytes"}  # fmt: skip
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else "text")


def text_of(content: Any) -> str:
    """A content as text, that of its parts one after the other."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""


# -- what a template wants -----------------------------------------------------------------------

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


class TemplateForms:
    """What a chat template wants of the one form: found by trying, once for each."""

    def __init__(self, source: str, render: Callable[[Sequence[Message]], str | None]) -> None:
        """Has tried nothing.

        Args:
            source: The template's.
            render: Gives the text of messages, or None where the template refuses them.
        """
        self._source = source
        self._render = render
        self._shown: dict[tuple[str, str], bool] = {}

    def adapted(self, message: Message) -> dict[str, Any]:
        """A message as the template wants it."""
        adapted: dict[str, Any] = {**message, "role": self._role(message.get("role"))}
        if content := message.get("content"):
            adapted["content"] = self._content(adapted["role"], content)
        if message.get("tool_calls") and self._wants_text:
            adapted["tool_calls"] = [_with_text(call) for call in message["tool_calls"]]
        return adapted

    def _role(self, role: Any) -> Any:
        if role == "developer" and "developer" not in self._source:
            return "system"
        return "tool" if role == "function" and self._knows_tools else role

    @cached_property
    def _knows_tools(self) -> bool:
        return re.search(r"['\"]tool['\"]", self._source) is not None

    def _content(self, role: str, content: Any) -> Any:
        """A content as text, unless the template walks over parts, or takes nothing else."""
        if not isinstance(content, str | list):
            return content  # which the template's process tells of
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
            shows = self._shows(self._render(tried))
            if not shows and form != "text":  # some take nothing but parts, of anyone
                others = [{**each, "content": _in_parts(each["content"])} for each in tried]
                shows = self._shows(self._render(others))
            self._shown[role, form] = shows
        return self._shown[role, form]

    @staticmethod
    def _shows(text: str | None) -> bool:
        """Whether a text has the words, and not their list as Python or JSON would write it."""
        has_words = text is not None and all(word in text for word in _WORDS)
        return has_words and text is not None and _AS_IT_IS.search(text) is None

    @cached_property
    def _wants_text(self) -> bool:
        """Whether arguments are to be JSON's text: an object fails, or stands there as Python's."""
        text = self._render([_USER, _call(_OBJECT), _RESULT, _ANSWER])
        if text is not None and _WORDS[0] in text and "{'k'" not in text:
            return False
        text = self._render([_USER, _call(_TEXT), _RESULT, _ANSWER])
        return text is not None and _TEXT in text


def _in_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function: Any = call.get("function")
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(arguments, Mapping):
        return dict(call)
    text = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}
