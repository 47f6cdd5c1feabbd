"""The one form of conversations, whatever form they came in.

Rows, requests and prompts come here first: what is null is absent, calls of functions are
``tool_calls`` with an object of arguments, tools are wrapped. ``rendering.py`` has what templates
want of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from qlora_wgpu.data.columns import EmptyRow
from qlora_wgpu.data.conversations import REASONING_KEYS
from qlora_wgpu.data.json_rows import parse_json
from qlora_wgpu.errors import DataError
from qlora_wgpu.visible import quoted

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
    if isinstance(value, list | tuple):
        return [without_nulls(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def canonical_message(given: Any, name: str) -> dict[str, Any]:
    """A message in the one form; ``name`` is what an error calls it, such as ``message 2``."""
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
