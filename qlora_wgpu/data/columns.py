"""The keys of a row: which format they make, and what to do where they make none."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from types import MappingProxyType
from typing import Any

import numpy as np

from qlora_wgpu.errors import DataError
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.limits import NUMBERS
from qlora_wgpu.visible import quoted

_SHOWN_KEYS = 8  # of a row, in a message
_COMPARED_KEYS = 64  # with those that are known

# The keys that make a format, in order of precedence: a row of a conversation may carry more.
FORMATS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt/completion": ("prompt", "completion"),
    "instruction/output": ("instruction", "output"),
    "text": ("text",),
}
PAIR, INSTRUCTION = "prompt/completion", "instruction/output"
CHAT_PAIR = "conversational prompt/completion"  # of lists of messages
CHATS = ("messages", "conversations", CHAT_PAIR)  # formats that a chat template writes
_NONE: Mapping[str, str] = MappingProxyType({})
_KNOWN_KEYS = sorted({key for keys in FORMATS.values() for key in keys})

WEIGHT = "weight"  # a row's in the loss, which only data.columns makes one
_MORE_KEYS = ("input", "system", "history", "tools", WEIGHT)  # that rows of some formats may have
_ANSWER_KEYS = ("chosen", "rejected", "label")  # of rows that compare or judge answers
_MAPPED_KEYS = sorted({*_KNOWN_KEYS, *_MORE_KEYS, *_ANSWER_KEYS})

# What other trainers call a number for each token, which says whether or how much it is learnt.
_MASKS = frozenset(
    {
        *("assistant_mask", "assistant_masks", "completion_mask", "completion_masks", "label_mask"),
        *("labels", "loss_mask", "loss_masks", "loss_weights", "response_mask", "token_weights"),
        "weights",
    }
)

# Names that data sets give to columns of these formats.
_USUAL_NAMES = {
    "messages": "conversation dialog dialogue chat turns",
    "prompt": "question query input user problem request instruction context source",
    "completion": "answer response output reply solution target assistant chosen",
    "output": "response answer completion reply",
    "text": "content body document article story passage",
}


class EmptyRow(DataError):
    """A row of a format that holds nothing: it is left out and counted, and ends no run."""


def keys_of(row_format: str) -> tuple[str, ...]:
    """The keys that make a format."""
    return FORMATS[PAIR if row_format == CHAT_PAIR else row_format]


def with_columns(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """A row under its format's keys."""
    renamed = dict(row)
    for key, column in columns.items():
        if column not in row:
            hint = _near(column, list(row)[:_COMPARED_KEYS])
            if key in row and column in _MAPPED_KEYS:
                hint = f": did you mean {{{column}: {key}}}?"
            raise DataError(
                f"data.columns names the column {quoted(column)} for {quoted(key)}, but the row's "
                f"are {_keys_of(row)}{hint}"
            )
        if key not in _MAPPED_KEYS:
            keys = ", ".join(_MAPPED_KEYS)
            hint = _near(key, _MAPPED_KEYS) or f": the keys of formats are {keys}"
            raise DataError(f"data.columns has the key {quoted(key)}, which no format has{hint}")
        renamed[key] = row[column]
    return renamed


def _near(word: str, words: Sequence[str]) -> str:
    """A question for the word that is likely meant, or nothing."""
    near = difflib.get_close_matches(word[:_COMPARED_KEYS], words, n=1)
    return f": did you mean {quoted(near[0])}?" if near else ""


def detect_format(
    row: Mapping[str, Any], row_format: str = "auto", columns: Mapping[str, str] = _NONE
) -> str:
    """Names the format of a row by its keys.

    Keys without a value count only where nothing else makes a format: a table has all columns in
    every row. Formats that the user has named columns for go before others.
    """
    filled = {key for key, value in row.items() if value is not None}
    for present in (filled, row.keys()):
        for name in sorted(FORMATS, key=lambda name: columns.keys().isdisjoint(FORMATS[name])):
            if row_format in ("auto", name) and present >= set(FORMATS[name]):
                are_lists = name == PAIR and isinstance(row["prompt"], list)
                return CHAT_PAIR if are_lists else name
    formats = FORMATS if row_format == "auto" else {row_format: FORMATS[row_format]}
    needed = "; or ".join(" and ".join(map(quoted, keys)) for keys in formats.values())
    raise DataError(
        f"a row needs the key {needed}; its keys are {_keys_of(row)}{_hint(row, formats)}"
    )


def _hint(row: Mapping[str, Any], formats: Mapping[str, tuple[str, ...]]) -> str:
    """How a setting would make one of the formats of a row, or which key is misspelt."""
    for name, keys in FORMATS.items():
        if name not in formats and row.keys() >= set(keys):
            return f", which make the format {name!r}: set data.format to it or to auto"
    if formats is FORMATS and row.keys() >= {"chosen", "rejected"}:
        alone = "messages" if isinstance(row["chosen"], list) else "text"
        key = "completion" if "prompt" in row else alone
        return (
            ": train.objective: dpo learns from 'chosen' and 'rejected'; to learn the chosen "
            f"answers alone, set data.columns: {_in_yaml({key: 'chosen'})} (init: --columns)"
        )
    for keys in formats.values():
        columns = {key: column for key in keys if (column := _column_for(key, row))}
        if len(columns) == len(keys):
            renamed = {key: column for key, column in columns.items() if key != column}
            return (
                f": if so they are meant, set data.columns: {_in_yaml(renamed)} (init: --columns)"
            )
    for key in [key for key in list(row)[:_COMPARED_KEYS] if key not in _KNOWN_KEYS]:
        if near := difflib.get_close_matches(key[:_COMPARED_KEYS], _KNOWN_KEYS, n=1):
            return f" ({quoted(key)} looks like '{near[0]}')"
    if not row:
        return ""
    return (
        ": data.columns says what they are, such as {text: "
        + next(iter(row))[:_COMPARED_KEYS]
        + "}"
    )


def _column_for(key: str, row: Mapping[str, Any]) -> str | None:
    """The column that a format's key is likely called."""
    if key in row:
        return key
    names = _USUAL_NAMES.get(key, "").split()
    kind = list if key == "messages" else str
    return next((name for name in names if isinstance(row.get(name), kind)), None)


def _in_yaml(columns: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{key}: {column}" for key, column in columns.items()) + "}"


def _keys_of(row: Mapping[str, Any]) -> str:
    return ", ".join(quoted(key) for key in list(row)[:_SHOWN_KEYS]) or "none"


def is_blank(row: Mapping[str, Any]) -> bool:
    """Whether a row holds no value at all, whatever its keys are."""
    return all(value is None for value in row.values())


def weight_of(row: Mapping[str, Any], columns: Mapping[str, str]) -> float:
    """A row's weight in the loss: one, unless ``data.columns`` names a column for it."""
    if WEIGHT not in columns:
        return 1.0
    value = row[WEIGHT]
    try:
        weight = float(value) if isinstance(value, Real | str) else math.nan
    except (ValueError, OverflowError):
        weight = math.nan
    if isinstance(value, bool) or not (weight == 0 or NUMBERS[0] <= weight <= NUMBERS[1]):
        raise DataError(
            f"the weight in {quoted(columns[WEIGHT])} must be a number, 0 or from {NUMBERS[0]:g} "
            f"to {NUMBERS[1]:g}, got {quoted(value)}"
        )
    return weight


def refuse_masks(row: Mapping[str, Any]) -> None:
    """Refuses a column that says which tokens of a row are learnt, in the words of other trainers.

    ``labels`` that leave no token out say nothing, or are classes of the text.
    """
    for key in sorted(_MASKS & row.keys()):
        numbers = _numbers_of(row[key])
        if numbers is None or (key == "labels" and IGNORE_INDEX not in numbers):
            continue
        raise DataError(
            f"the column '{key}' says which tokens are learnt, which is not read beside a text: "
            "give what is learnt as a 'completion', or turns that are not a train: false (or "
            "input_ids and labels to a Trainer), or leave the column out"
        )


def _numbers_of(value: Any) -> Any:
    """A list of numbers as an array, also where a table keeps it as text; None for all else."""
    if isinstance(value, str) and value.startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    if isinstance(value, str) or not is_numeric(value):
        return None
    array = np.asarray(value)
    return array if array.ndim == 1 and array.size else None


def is_numeric(value: Any) -> bool:
    """Whether a value is a number or a truth value, or a list of these."""
    try:
        return np.asarray(value).dtype.kind in "iufb"
    except ValueError:  # lists of several lengths
        return False
