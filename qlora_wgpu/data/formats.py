"""Formats of rows, and their encoding as token ids and labels."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from qlora_wgpu.data.built_in_templates import suitable_template
from qlora_wgpu.data.chat import ChatTemplate
from qlora_wgpu.data.json_text import parse_json
from qlora_wgpu.data.long_text import document_ids, size_of
from qlora_wgpu.data.masking import Span, assistant_spans, last_turn_spans, tokens_in_spans
from qlora_wgpu.data.tokenizer import Tokenizer
from qlora_wgpu.errors import DataError
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.limits import MAX_AT_ONCE, MAX_MESSAGES, MAX_TEXT
from qlora_wgpu.visible import quoted

_SHOWN_KEYS = 8  # of a row, in a message
_COMPARED_KEYS = 64  # with those that are known

TrainOn = Literal["auto", "assistant", "last_turn", "completion", "all"]

# The keys that make a format, in order of precedence: a row of a conversation may carry more.
FORMATS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt/completion": ("prompt", "completion"),
    "instruction/output": ("instruction", "output"),
    "text": ("text",),
}
CHATS = ("messages", "conversations")  # formats that a chat template writes
_KNOWN_KEYS = sorted({key for keys in FORMATS.values() for key in keys})

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

# The wording of Stanford Alpaca's prompts, which models and data sets have used since.
_TASK = "Below is an instruction that describes a task"
_REQUEST = "Write a response that appropriately completes the request."


class EmptyRow(DataError):
    """A row of a format that holds nothing: it is left out and counted, and ends no run."""


def with_columns(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """A row under its format's keys.

    Args:
        row: The row as it was read.
        columns: The row's own names by the format's.

    Raises:
        DataError: If the row lacks a column.
    """
    renamed = dict(row)
    for key, column in columns.items():
        if column not in row:
            raise DataError(
                f"data.columns names the column '{column}' for '{key}', but the row's are "
                f"{_keys_of(row)}"
            )
        renamed[key] = row[column]
    return renamed


def detect_format(row: Mapping[str, Any], row_format: str = "auto") -> str:
    """Names the format of a row by its keys.

    Keys without a value count only where nothing else makes a format: a table has all columns in
    every row.

    Args:
        row: The row.
        row_format: The format it must have, if any.

    Raises:
        DataError: If the keys fit no format.
    """
    filled = {key for key, value in row.items() if value is not None}
    for present in (filled, row.keys()):
        for name, keys in FORMATS.items():
            if row_format in ("auto", name) and present >= set(keys):
                return name
    near = [
        f"{quoted(key)} looks like '{close[0]}'"
        for key in list(row)[:_COMPARED_KEYS]
        if key not in _KNOWN_KEYS
        and (close := difflib.get_close_matches(key[:_COMPARED_KEYS], _KNOWN_KEYS, n=1))
    ]
    formats = FORMATS.values() if row_format == "auto" else [FORMATS[row_format]]
    needed = "; or ".join(" and ".join(f"'{key}'" for key in keys) for keys in formats)
    hint = f" ({near[0]})" if near else ""
    raise DataError(f"a row needs the key {needed}; its keys are {_keys_of(row)}{hint}")


def _keys_of(row: Mapping[str, Any]) -> str:
    return ", ".join(quoted(key) for key in list(row)[:_SHOWN_KEYS]) or "none"


def is_blank(row: Mapping[str, Any]) -> bool:
    """Whether a row holds no value at all, whatever its keys are."""
    return all(value is None for value in row.values())


class Encoded(NamedTuple):
    """A row as tokens: equally many ids and labels, and the text that they stand for."""

    ids: list[int]
    labels: list[int]
    text: str


class RowEncoder:
    """Turns rows into token ids and labels.

    Labels are the ids themselves where the model learns and -100 elsewhere; they are not shifted.
    What is learnt is ``train_on``: in chats the assistant's turns (auto, assistant) or the last of
    them (last_turn, completion), in rows with an answer the answer, and of a ``text`` all; or (all)
    everything. Except in chats, where the template
    decides, the tokenizer's special tokens are added in front (never a second beginning-of-sequence
    token) and the end-of-sequence token behind, which is learnt.

    Attributes:
        num_system_dropped: Conversations whose system message the template left out, as some do
            without a word.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, train_on: TrainOn = "auto"
    ) -> None:
        """Builds an encoder.

        Args:
            tokenizer: The model's tokenizer.
            template: The chat template, or None if there is none.
            train_on: The tokens that are learnt.
        """
        self._train_on = train_on
        self._tokenizer = tokenizer
        self._template = template
        self.num_system_dropped = 0
        self._encoders: dict[str, Callable[[Mapping[str, Any]], Encoded]] = {
            "messages": self._messages,
            "conversations": self._conversations,
            "prompt/completion": self._prompt_completion,
            "instruction/output": self._instruction,
            "text": self._text,
        }

    def encode(self, row: Mapping[str, Any], row_format: str) -> Encoded:
        """Encodes a row of a known format.

        Returns:
            Ids and labels of equal length, and the text.

        Raises:
            EmptyRow: If the row holds nothing but white space.
            DataError: If a value of the row is missing or of the wrong type, or the chat template
                cannot take it.
        """
        if all(row.get(key) is None for key in FORMATS[row_format]):
            needed = " or ".join(f"'{key}'" for key in FORMATS[row_format])
            raise EmptyRow(f"{needed} must be a list of messages or a text, got nothing")
        return self._encoders[row_format](row)

    def _messages(self, row: Mapping[str, Any]) -> Encoded:
        return self._chat(_checked_messages(_from_json(row["messages"]), "messages"), row)

    def _conversations(self, row: Mapping[str, Any]) -> Encoded:
        turns = _from_json(row["conversations"])
        if isinstance(turns, list) and turns and isinstance(turns[0], dict) and "role" in turns[0]:
            return self._chat(_checked_messages(turns, "conversations"), row)
        messages = _from_sharegpt(turns)
        system = row.get("system")
        if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        return self._chat(messages, row)

    def _chat(self, messages: list[dict[str, Any]], row: Mapping[str, Any]) -> Encoded:
        if not any(map(_says_anything, messages)):
            raise EmptyRow("the messages hold no text at all")
        if self._template is None:
            raise DataError(
                "the rows are conversations but the tokenizer has no chat template: set "
                "data.chat_template to a .jinja file or a built-in name, such as "
                f"{suitable_template(self._tokenizer)}, which fits its tokens"
            )
        tools = _from_json(row.get("tools"))
        if tools is not None and not (
            isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
        ):
            raise DataError("'tools' must be a list of objects")
        last = self._train_on in ("last_turn", "completion")
        find = last_turn_spans if last else assistant_spans
        text, spans = find(self._template, messages, tools or None, self._tokenizer.eos_token)
        self.num_system_dropped += any(
            message["role"] == "system"
            and isinstance(message.get("content"), str)
            and message["content"].strip() not in text
            for message in messages
        )
        if self._train_on == "all":
            spans = [(0, len(text))]
        # The template writes the special tokens itself, the beginning-of-sequence token included.
        return self._masked(text, spans, add_special_tokens=False)

    def _prompt_completion(self, row: Mapping[str, Any]) -> Encoded:
        return self._answer(_text_of(row, "prompt"), _text_of(row, "completion"))

    def _instruction(self, row: Mapping[str, Any]) -> Encoded:
        extra = "" if row.get("input") is None else _text_of(row, "input")
        prompt = alpaca_prompt(_text_of(row, "instruction"), extra)
        output = _text_of(row, "output")
        _check_not_blank(row["instruction"] + extra + output)
        return self._answer(prompt, output)

    def _text(self, row: Mapping[str, Any]) -> Encoded:
        if self._train_on not in ("auto", "all"):
            raise DataError(
                f"data.train_on is {self._train_on}, but a 'text' has no turns: set it to all"
            )
        text = _text_of(row, "text")
        _check_not_blank(text)
        if size_of(text) > MAX_TEXT:
            raise _too_long(text, MAX_TEXT)
        pieces = document_ids(self._tokenizer, [text], self._needs_special_tokens(text))
        ids = [i for piece in pieces for i in piece]
        return self._ended(ids, list(ids), text)

    def _needs_special_tokens(self, text: str) -> bool:
        """Whether a row's text does not begin with a special token of its own."""
        bos = self._tokenizer.bos_token
        return not (bos and text.startswith(bos))

    def _answer(self, prompt: str, answer: str) -> Encoded:
        text = prompt + answer
        _check_not_blank(text)
        answered = [(len(prompt), len(text))]
        ids, labels, _ = self._masked(text, answered, self._needs_special_tokens(text))
        encoded = self._ended(ids, labels, text)
        return encoded._replace(labels=list(ids)) if self._train_on == "all" else encoded

    def _ended(self, ids: list[int], labels: list[int], text: str) -> Encoded:
        """The row with the end-of-sequence token behind it, which is learnt."""
        eos = self._tokenizer.eos_token_id
        if eos is not None:
            if not ids or ids[-1] != eos:
                ids.append(eos)
                labels.append(eos)
            labels[-1] = eos
        return Encoded(ids, labels, text)

    def _masked(self, text: str, spans: list[Span], add_special_tokens: bool) -> Encoded:
        if size_of(text) > MAX_AT_ONCE:
            raise _too_long(text, MAX_AT_ONCE)
        ids, offsets = self._tokenizer.encode_with_offsets(text, add_special_tokens)
        learnt = tokens_in_spans(offsets, spans)
        labels = [i if yes else IGNORE_INDEX for i, yes in zip(ids, learnt, strict=True)]
        return Encoded(ids, labels, text)


def alpaca_prompt(instruction: str, extra: str = "") -> str:
    """The prompt of an instruction, with or without an input to it."""
    if not extra.strip():
        return f"{_TASK}. {_REQUEST}\n\n### Instruction:\n{instruction}\n\n### Response:\n"
    return (
        f"{_TASK}, paired with an input that provides further context. {_REQUEST}\n\n"
        f"### Instruction:\n{instruction}\n\n### Input:\n{extra}\n\n### Response:\n"
    )


def _too_long(text: str, limit: int) -> DataError:
    return DataError(
        f"its text has {size_of(text):,} bytes, more than {limit:,}: cut it into several rows, or "
        "put a document into a .txt file"
    )


def _check_not_blank(text: str) -> None:
    if not text.strip():
        raise EmptyRow("the row has no text at all")


def _says_anything(message: Mapping[str, Any]) -> bool:
    """Whether a message has more than its role and white space."""
    others = (value for key, value in message.items() if key not in ("role", "content"))
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    return any(others) or any(str(part.get("text") or "").strip() for part in parts)


def _text_of(row: Mapping[str, Any], key: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise DataError(f"'{key}' must be text, got {_kind(value)}")
    return value


def _checked_messages(value: Any, key: str) -> list[dict[str, Any]]:
    messages = _list_of(value, f"'{key}' must be a list of messages that is not empty")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise DataError(f"message {number} must be an object, got {_kind(message)}")
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
                    "only text can be learnt"
                )
        return
    raise DataError(f"message {number} needs 'content' as text, got {_kind(content)}")


def _from_sharegpt(turns: Any) -> list[dict[str, Any]]:
    messages = []
    requirement = "'conversations' must be a list of turns that is not empty"
    for number, turn in enumerate(_list_of(turns, requirement), start=1):
        if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
            raise DataError(f"turn {number} needs 'from' and 'value'")
        role = _SHAREGPT_ROLES.get(str(turn["from"]).lower())
        if role is None:
            raise DataError(
                f"turn {number} is from {quoted(turn['from'])}, which is none of "
                f"{', '.join(sorted(_SHAREGPT_ROLES))}"
            )
        if not isinstance(turn["value"], str):
            raise DataError(f"turn {number} needs 'value' as text, got {_kind(turn['value'])}")
        messages.append({"role": role, "content": turn["value"]})
    return messages


def _from_json(value: Any) -> Any:
    """A list that a table keeps as text."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return parse_json(value)
        except DataError as err:
            raise DataError(f"a list kept as text is {err}") from err
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", bool: "a truth value", type(None): "nothing"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else "text")
