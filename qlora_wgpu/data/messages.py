"""Messages of rows, requests and prompts in their various formats, and their canonical form.

In the canonical form nulls are dropped, function calls are ``tool_calls`` with an object of
arguments, and tools are wrapped. ``conversations.py`` adapts it to what a template supports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qlora_wgpu.data.columns import INSTRUCTION, PAIR, EmptyRow
from qlora_wgpu.data.conversations import FLAGS, REASONING_KEYS, flags_of, text_of
from qlora_wgpu.data.json_rows import parse_json
from qlora_wgpu.errors import DataError
from qlora_wgpu.limits import MAX_MESSAGES
from qlora_wgpu.visible import quoted

_NO_OPTIONS = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
     "chat_template", "tokenize", "padding", "truncation", "max_length", "return_tensors",
     "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"}
)  # fmt: skip
_PLAIN_CALL = "function_call"  # OpenAI's older key


def without_nulls(value: Any) -> Any:
    """A JSON value without nulls in its objects: tables fill missing keys with them."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def canonical_message(given: Any, name: str) -> dict[str, Any]:
    """A message in the canonical form; errors call it ``name``, such as ``message 2``."""
    if not isinstance(given, Mapping):
        raise DataError(f"{name} must be an object, got {kind_of(given)}")
    message: dict[str, Any] = without_nulls(given)
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise DataError(f"{name} must have a 'role' such as 'user' or 'assistant'")
    calls = from_json(message.pop("tool_calls", None))
    plain = message.pop(_PLAIN_CALL, None)
    if calls in (None, [], "") and plain not in (None, {}, ""):
        calls = [from_json(plain, "{")]
    if calls not in (None, [], ""):
        if not isinstance(calls, list):
            raise DataError(f"{name}: 'tool_calls' must be a list, got {kind_of(calls)}")
        message["tool_calls"] = [_canonical_call(call, name) for call in calls]
    if "content" not in message:
        if not calls and not any(message.get(key) for key in REASONING_KEYS):
            if "content" in given:
                raise EmptyRow(f"{name} has no content")
            raise DataError(f"{name}: 'content' is missing")
        message["content"] = ""
    _check_content(message["content"], name)
    return message


def _canonical_call(call: Any, name: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"{name} has a tool call without the 'name' of a function")
    arguments = function.get("arguments", function.get("parameters"))
    known = {key: value for key, value in function.items() if key != "parameters"}
    own = {key: value for key, value in call.items() if key != "function"}
    if function is call:  # the keys of function and call are not nested
        own = {key: known.pop(key) for key in ("id", "type") if key in known}
    return {"type": "function", **own, "function": {**known, "arguments": _object(arguments)}}


def _object(arguments: Any) -> Any:
    """Arguments as an object; text that is not a JSON object is kept, and so are nulls in text."""
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
                    f"{name} has a part of type {quoted(part.get('type'))}, which is not supported "
                    "(supported: text)"
                )
        return
    raise DataError(f"{name}: 'content' must be text, got {kind_of(content)}")


def canonical_tools(value: Any) -> list[dict[str, Any]] | None:
    """Tools in the canonical form, as objects with a ``function``; None if there are none."""
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
    """A row's other variables of the chat template, TRL's ``chat_template_kwargs``."""
    options = from_json(value, "{")
    if options is None or options == "":
        return {}
    if not isinstance(options, Mapping):
        raise DataError(f"'chat_template_kwargs' must be an object, got {kind_of(options)}")
    taken = sorted(_NO_OPTIONS & options.keys())
    if taken:
        raise DataError(
            f"'chat_template_kwargs' must not have {quoted(taken[0])}, which is set for every "
            "conversation: remove it"
        )
    return dict(without_nulls(options))


def from_json(value: Any, opener: str = "[") -> Any:
    """Parses a list, or an object, that a table stores as text."""
    if isinstance(value, str) and value.lstrip().startswith(opener):
        what = "a list" if opener == "[" else "an object"
        try:
            return parse_json(value)
        except DataError as err:
            raise DataError(f"{what} stored as text is {err}") from err
    return value


def kind_of(value: Any) -> str:
    """The type of a JSON value, in words."""
    names = {dict: "an object", list: "a list", bool: "a boolean", type(None): "nothing",
             bytes: "bytes"}  # fmt: skip
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else "text")


# ---- Alpaca's prompts ----------------------------------------------------------------------------

# The wording of Stanford Alpaca's prompts.
_TASK = "Below is an instruction that describes a task"
_REQUEST = "Write a response that appropriately completes the request."


def alpaca_prompt(
    instruction: str, extra: str = "", system: str = "", history: Sequence[tuple[str, str]] = ()
) -> str:
    """Alpaca's prompt for an instruction."""
    task = f"{_TASK}, paired with an input that provides further context." if extra.strip() else ""
    task = task or f"{_TASK}."
    parts = [system if system.strip() else f"{task} {_REQUEST}"]
    for earlier, answer in history:
        parts += [f"### Instruction:\n{earlier}", f"### Response:\n{answer}"]
    parts.append(f"### Instruction:\n{instruction}")
    if extra.strip():
        parts.append(f"### Input:\n{extra}")
    return "\n\n".join([*parts, "### Response:\n"])


def history_of(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The earlier instructions and answers of a row in Alpaca's format."""
    turns = from_json(row.get("history")) or []
    pairs = [turn for turn in turns if isinstance(turn, list) and len(turn) == 2]
    if not isinstance(turns, list) or len(pairs) < len(turns):
        raise DataError("'history' must be a list of pairs of an instruction and an answer")
    if not all(isinstance(text, str) for pair in pairs for text in pair):
        raise DataError("'history' must contain only text")
    return [(instruction, answer) for instruction, answer in pairs]


# ---- messages from rows --------------------------------------------------------------------------

_SYSTEM_ROLES = ("system", "developer")  # a first message that takes precedence over ``system``

_NO_CONTENT = {"role", "content", *FLAGS}  # keys that are not content of their own

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
_ANSWERS = {PAIR: "completion", INSTRUCTION: "output"}
_CALL = "function_call"  # ShareGPT's role of a tool call as JSON


def with_system(messages: list[dict[str, Any]], row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Puts a row's ``system`` before messages without a system message."""
    system = row.get("system")
    if not isinstance(system, str) or not system.strip() or messages[0]["role"] in _SYSTEM_ROLES:
        return messages
    return [{"role": "system", "content": system}, *messages]


def checked_messages(value: Any, key: str) -> list[dict[str, Any]]:
    """The messages of a row, a request or a prompt in the canonical form."""
    messages = _list_of(value, f"'{key}' must be a non-empty list of messages")
    return [canonical_message(each, f"message {i}") for i, each in enumerate(messages, start=1)]


def _list_of(value: Any, requirement: str) -> list[Any]:
    if value is None or value in ([], ""):
        raise EmptyRow(requirement)
    if not isinstance(value, list | tuple):
        raise DataError(requirement)
    if len(value) > MAX_MESSAGES:
        raise DataError(f"it has {len(value):,} messages, more than {MAX_MESSAGES:,}")
    return list(value)


def first_holds(turns: Any, key: str) -> bool:
    """Whether the first turn has a key, which tells the format of the list."""
    first = turns[0] if isinstance(turns, list) and turns else None
    return isinstance(first, dict) and key in first


def from_sharegpt(turns: Any) -> list[dict[str, Any]]:
    """ShareGPT's turns as messages."""
    messages = []
    requirement = "'conversations' must be a non-empty list of turns"
    for number, turn in enumerate(_list_of(turns, requirement), start=1):
        if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
            raise DataError(f"turn {number} must have 'from' and 'value'")
        message = _message_of(turn["from"], turn["value"], number) | flags_of(turn)
        messages.append(canonical_message(message, f"turn {number}"))
    return messages


def _message_of(name: Any, value: Any, number: int) -> dict[str, Any]:
    role = _SHAREGPT_ROLES.get(str(name).lower())
    if role is None and name != _CALL:
        names = ", ".join(sorted({*_SHAREGPT_ROLES, _CALL}))
        raise DataError(f"turn {number}: unknown 'from' {quoted(name)} (supported: {names})")
    if value is not None and not isinstance(value, str):
        raise DataError(f"turn {number}: 'value' must be text, got {kind_of(value)}")
    if role is not None or value is None:
        return {"role": role or "assistant", "content": value}
    return {"role": "assistant", "content": "", "tool_calls": _tool_calls(value, number)}


def _tool_calls(text: str, number: int) -> list[dict[str, Any]]:
    try:
        value = parse_json(text)
    except DataError as err:
        raise DataError(f"turn {number} is from '{_CALL}', but its value is {err}") from err
    calls = value if isinstance(value, list) else [value]
    if not calls or not all(isinstance(call, dict) and "name" in call for call in calls):
        raise DataError(
            f"turn {number} is from '{_CALL}': its value must be JSON with 'name' and 'arguments'"
        )
    return [{"type": "function", "function": call} for call in calls]


def as_chat(row: Mapping[str, Any], row_format: str) -> tuple[dict[str, Any], str]:
    """Converts a prompt and an answer as text to messages (``data.apply_chat_template``).

    As mlx-lm does with completions, LLaMA-Factory with instructions and torchtune with instruct
    data sets. An ``input`` follows its ``instruction`` on a new line. Other formats are unchanged.
    """
    answer = _ANSWERS.get(row_format)
    if answer is None:
        return dict(row), row_format
    messages = [*_prompt_of(row, row_format), {"role": "assistant", "content": row[answer]}]
    return {**row, "messages": messages}, "messages"


def with_chat_prompt(row: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the prompt and the answers of a preference row to messages."""
    named = PAIR if row.get("prompt") is not None else INSTRUCTION
    if not isinstance(row.get("prompt", row.get("instruction")), str):
        return dict(row)
    answers = {
        key: [{"role": "assistant", "content": row[key]}]
        for key in ("chosen", "rejected", "completion")
        if isinstance(row.get(key), str)
    }
    return {**row, **answers, "prompt": _prompt_of(row, named)}


def _prompt_of(row: Mapping[str, Any], row_format: str) -> list[dict[str, Any]]:
    if row_format == PAIR:
        return [{"role": "user", "content": row["prompt"]}]
    turns = [
        {"role": role, "content": text}
        for pair in history_of(row)
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    request, extra = row["instruction"], row.get("input")
    if isinstance(request, str) and isinstance(extra, str) and extra:
        request = f"{request}\n{extra}" if request else extra
    return [*turns, {"role": "user", "content": request}]


def has_content(message: Mapping[str, Any]) -> bool:
    """Whether a message has more than its role, flags and white space."""
    others = (value for key, value in message.items() if key not in _NO_CONTENT)
    return any(others) or bool(text_of(message.get("content")).strip())
