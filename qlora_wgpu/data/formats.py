"""Formats of rows, and their encoding as token ids and labels."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from qlora_wgpu.data.chat import ChatTemplate
from qlora_wgpu.data.masking import Span, assistant_spans, tokens_in_spans
from qlora_wgpu.data.tokenizer import Tokenizer
from qlora_wgpu.errors import DataError
from qlora_wgpu.labels import IGNORE_INDEX

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
            names = ", ".join(f"'{name}'" for name in list(row)[:8]) or "none"
            raise DataError(
                f"data.columns names the column '{column}' for '{key}', but the row's are {names}"
            )
        renamed[key] = row[column]
    return renamed


def detect_format(row: Mapping[str, Any], row_format: str = "auto") -> str:
    """Names the format of a row by its keys.

    Args:
        row: The row.
        row_format: The format it must have, if any.

    Raises:
        DataError: If the keys fit no format.
    """
    for name, keys in FORMATS.items():
        if row_format in ("auto", name) and all(key in row for key in keys):
            return name
    names = ", ".join(f"'{key}'" for key in list(row)[:8]) or "none"
    near = [
        f"'{key}' looks like '{close[0]}'"
        for key in row
        if key not in _KNOWN_KEYS and (close := difflib.get_close_matches(key, _KNOWN_KEYS, n=1))
    ]
    formats = FORMATS.values() if row_format == "auto" else [FORMATS[row_format]]
    needed = "; or ".join(" and ".join(f"'{key}'" for key in keys) for keys in formats)
    hint = f" ({near[0]})" if near else ""
    raise DataError(f"a row needs the key {needed}; its keys are {names}{hint}")


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
            DataError: If a value of the row is missing or of the wrong type, or the chat template
                cannot take it.
        """
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
        if self._template is None:
            raise DataError(
                "the rows are conversations but the tokenizer has no chat template: set "
                "data.chat_template to a .jinja file or to chatml"
            )
        tools = _from_json(row.get("tools"))
        if tools is not None and not (
            isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
        ):
            raise DataError("'tools' must be a list of objects")
        text, spans = assistant_spans(
            self._template, messages, tools or None, self._tokenizer.eos_token
        )
        self.num_system_dropped += any(
            message["role"] == "system"
            and isinstance(message.get("content"), str)
            and message["content"].strip() not in text
            for message in messages
        )
        if self._train_on == "all":
            spans = [(0, len(text))]
        elif self._train_on in ("last_turn", "completion"):
            spans = self._last_turn(messages, spans)
        # The template writes the special tokens itself, the beginning-of-sequence token included.
        return self._masked(text, spans, add_special_tokens=False)

    @staticmethod
    def _last_turn(messages: list[dict[str, Any]], spans: list[Span]) -> list[Span]:
        return spans[-1:] if messages[-1]["role"] == "assistant" else []

    def _prompt_completion(self, row: Mapping[str, Any]) -> Encoded:
        return self._answer(_text_of(row, "prompt"), _text_of(row, "completion"))

    def _instruction(self, row: Mapping[str, Any]) -> Encoded:
        extra = "" if row.get("input") is None else _text_of(row, "input")
        prompt = alpaca_prompt(_text_of(row, "instruction"), extra)
        return self._answer(prompt, _text_of(row, "output"))

    def _text(self, row: Mapping[str, Any]) -> Encoded:
        if self._train_on not in ("auto", "all"):
            raise DataError(
                f"data.train_on is {self._train_on}, but a 'text' has no turns: set it to all"
            )
        return self._answer("", _text_of(row, "text"), learn_all=True)

    def _answer(self, prompt: str, answer: str, learn_all: bool = False) -> Encoded:
        text = prompt + answer
        if not text:
            raise DataError("the row has no text at all")
        bos = self._tokenizer.bos_token
        add_special_tokens = not (bos and text.startswith(bos))
        ids, labels, _ = self._masked(text, [(len(prompt), len(text))], add_special_tokens)
        eos = self._tokenizer.eos_token_id
        if eos is not None:
            if not ids or ids[-1] != eos:
                ids.append(eos)
                labels.append(eos)
            labels[-1] = eos
        learn_all = learn_all or self._train_on == "all"
        return Encoded(ids, list(ids) if learn_all else labels, text)

    def _masked(self, text: str, spans: list[Span], add_special_tokens: bool) -> Encoded:
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


def _text_of(row: Mapping[str, Any], key: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise DataError(f"'{key}' must be text, got {_kind(value)}")
    return value


def _checked_messages(value: Any, key: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise DataError(f"'{key}' must be a list of messages that is not empty")
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict):
            raise DataError(f"message {number} must be an object, got {_kind(message)}")
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise DataError(f"message {number} needs a 'role' such as 'user' or 'assistant'")
        _check_content(message, number)
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
                    f"message {number} holds a part of type {part.get('type')!r}: "
                    "only text can be learnt"
                )
        return
    raise DataError(f"message {number} needs 'content' as text, got {_kind(content)}")


def _from_sharegpt(turns: Any) -> list[dict[str, Any]]:
    if not isinstance(turns, list) or not turns:
        raise DataError("'conversations' must be a list of turns that is not empty")
    messages = []
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
            raise DataError(f"turn {number} needs 'from' and 'value'")
        role = _SHAREGPT_ROLES.get(str(turn["from"]).lower())
        if role is None:
            raise DataError(
                f"turn {number} is from {turn['from']!r}, which is none of "
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
            return json.loads(value)
        except ValueError as err:
            raise DataError(f"a list kept as text is not valid JSON: {err}") from err
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", bool: "a truth value", type(None): "nothing"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else "text")
