"""Messages of a conversation, in the two forms that rows keep them in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from qlora_wgpu.data.columns import EmptyRow
from qlora_wgpu.data.json_text import parse_json
from qlora_wgpu.data.turn_marks import MARKS, marks_of
from qlora_wgpu.errors import DataError
from qlora_wgpu.limits import MAX_MESSAGES
from qlora_wgpu.visible import quoted

# What chat templates know; there are more, which one or another does.
USUAL_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython"})

_SYSTEM_ROLES = ("system", "developer")  # of a message that stands in place of a row's own

_SAID_APART = {"role", "content", *MARKS}  # keys that are no more than these

_SHOWN_ROLES = 8  # in a message

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
_CALL = "function_call"  # of the assistant, whose value is JSON


def with_system(messages: list[dict[str, Any]], row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row's messages behind its ``system``, where it has one and they do not begin with theirs.

    Args:
        messages: At least one.
        row: The row.
    """
    system = row.get("system")
    if not isinstance(system, str) or not system.strip() or messages[0]["role"] in _SYSTEM_ROLES:
        return messages
    return [{"role": "system", "content": system}, *messages]


def checked_messages(value: Any, key: str) -> list[dict[str, Any]]:
    """The messages of a row, each with a role and content.

    Raises:
        EmptyRow: If there are none.
        DataError: If it is no list of messages.
    """
    messages = _list_of(value, f"'{key}' must be a list of messages that is not empty")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise DataError(f"message {number} must be an object, got {kind_of(message)}")
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise DataError(f"message {number} needs a 'role' such as 'user' or 'assistant'")
        _check_content(message, number)
    return messages


def _list_of(value: Any, requirement: str) -> list[Any]:
    if value is None or value in ([], ""):
        raise EmptyRow(requirement)
    if not isinstance(value, list):
        raise DataError(requirement)
    if len(value) > MAX_MESSAGES:
        raise DataError(f"it has {len(value):,} messages, more than {MAX_MESSAGES:,}")
    return value


def _check_content(message: Mapping[str, Any], number: int) -> None:
    content = message.get("content")
    if isinstance(content, str):
        return
    if content is None and message.get("tool_calls"):
        return
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        for part in content:
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise DataError(
                    f"message {number} holds a part of type {quoted(part.get('type'))}: "
                    "only text is read"
                )
        return
    raise DataError(f"message {number} needs 'content' as text, got {kind_of(content)}")


def first_holds(turns: Any, key: str) -> bool:
    """Whether the first of some turns has a key, which tells their form."""
    return (
        isinstance(turns, list) and bool(turns) and isinstance(turns[0], dict) and key in turns[0]
    )


def from_sharegpt(turns: Any) -> list[dict[str, Any]]:
    """Turns in ShareGPT's form as messages.

    Raises:
        EmptyRow: If there are none.
        DataError: If it is no list of turns.
    """
    messages = []
    requirement = "'conversations' must be a list of turns that is not empty"
    for number, turn in enumerate(_list_of(turns, requirement), start=1):
        if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
            raise DataError(f"turn {number} needs 'from' and 'value'")
        messages.append(_message_of(turn["from"], turn["value"], number) | marks_of(turn))
    return messages


def _message_of(name: Any, value: Any, number: int) -> dict[str, Any]:
    """A turn of ShareGPT's form as a message."""
    role = _SHAREGPT_ROLES.get(str(name).lower())
    if role is None and name != _CALL:
        names = ", ".join(sorted({*_SHAREGPT_ROLES, _CALL}))
        raise DataError(f"turn {number} is from {quoted(name)}, which is none of {names}")
    if not isinstance(value, str):
        raise DataError(f"turn {number} needs 'value' as text, got {kind_of(value)}")
    if role is not None:
        return {"role": role, "content": value}
    return {"role": "assistant", "content": "", "tool_calls": _tool_calls(value, number)}


def _tool_calls(text: str, number: int) -> list[dict[str, Any]]:
    """The calls that a turn writes as JSON: one, or a list of them."""
    try:
        value = parse_json(text)
    except DataError as err:
        raise DataError(f"turn {number} is from '{_CALL}', and its value is {err}") from err
    calls = value if isinstance(value, list) else [value]
    if not calls or not all(isinstance(call, dict) and "name" in call for call in calls):
        raise DataError(
            f"turn {number} is from '{_CALL}': its value must be JSON with 'name' and 'arguments'"
        )
    return [{"type": "function", "function": {"arguments": {}, **call}} for call in calls]


def from_json(value: Any) -> Any:
    """A list that a table keeps as text.

    Raises:
        DataError: If the text is no JSON.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return parse_json(value)
        except DataError as err:
            raise DataError(f"a list kept as text is {err}") from err
    return value


def kind_of(value: Any) -> str:
    """The kind of a JSON value, in words."""
    names = {dict: "an object", list: "a list", bool: "a truth value", type(None): "nothing",
             bytes: "bytes"}  # fmt: skip
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else "text")


def says_anything(message: Mapping[str, Any]) -> bool:
    """Whether a message has more than its role, white space and whether it is learnt."""
    others = (value for key, value in message.items() if key not in _SAID_APART)
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    return any(others) or any(str(part.get("text") or "").strip() for part in parts)


def is_left_out(message: Mapping[str, Any], text: str) -> bool:
    """Whether a template left a message out that it is free to leave out without being wrong."""
    free = message["role"] == "system" or message["role"] not in USUAL_ROLES
    content = message.get("content")
    return free and isinstance(content, str) and content.strip() not in text


def roles_in_words(roles: Iterable[str]) -> str:
    """Some roles, as a sentence names them."""
    return ", ".join(map(quoted, sorted(roles)[:_SHOWN_ROLES]))
