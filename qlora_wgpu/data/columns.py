"""The format of a row by its keys, and errors that suggest how to map other keys."""

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

_SHOWN_KEYS = 8  # of a row, in an error
_COMPARED_KEYS = 64  # of a row, for "did you mean"; also the characters of a key

# The required keys of each format, in order of precedence.
FORMATS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt/completion": ("prompt", "completion"),
    "instruction/output": ("instruction", "output"),
    "text": ("text",),
}
PAIR, INSTRUCTION = "prompt/completion", "instruction/output"
CHAT_PAIR = "conversational prompt/completion"  # as lists of messages
CHATS = ("messages", "conversations", CHAT_PAIR)  # formats that a chat template renders
_NONE: Mapping[str, str] = MappingProxyType({})
_KNOWN_KEYS = sorted({key for keys in FORMATS.values() for key in keys})

WEIGHT = "weight"  # a row's weight in the loss, only if data.columns maps a column to it
IMAGES = "images"  # a column of images that ``data.columns`` may map
_OPTIONAL_KEYS = ("input", "system", "history", "tools", IMAGES, WEIGHT)
_PREFERENCE_KEYS = ("chosen", "rejected", "label", "margin")
_MAPPED_KEYS = sorted({*_KNOWN_KEYS, *_OPTIONAL_KEYS, *_PREFERENCE_KEYS})

# Other trainers' names for loss masks and weights per token.
_LOSS_MASKS = frozenset(
    {
        *("assistant_mask", "assistant_masks", "completion_mask", "completion_masks", "label_mask"),
        *("labels", "loss_mask", "loss_masks", "loss_weights", "response_mask", "token_weights"),
        "weights",
    }
)

# Names that data sets commonly give to the columns of these formats.
_USUAL_NAMES = {
    "messages": "conversation dialog dialogue chat turns",
    "prompt": "question query input user problem request instruction context source",
    "completion": "answer response output reply solution target assistant chosen",
    "output": "response answer completion reply",
    "text": "content body document article story passage",
}


class EmptyRow(DataError):
    """A row without content: it is skipped and counted, and is no error."""


def keys_of(row_format: str) -> tuple[str, ...]:
    """The required keys of a format."""
    return FORMATS[PAIR if row_format == CHAT_PAIR else row_format]


def with_columns(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Adds the columns that ``data.columns`` maps under the keys of the format."""
    renamed = dict(row)
    for key, column in columns.items():
        if column not in row:
            hint = _near(column, list(row)[:_COMPARED_KEYS])
            if key in row and column in _MAPPED_KEYS:
                hint = f": did you mean {{{column}: {key}}}?"
            raise DataError(
                f"data.columns maps {quoted(key)} to the column {quoted(column)}, but the row's "
                f"columns are {_keys_of(row)}{hint}"
            )
        if key not in _MAPPED_KEYS:
            keys = ", ".join(_MAPPED_KEYS)
            hint = _near(key, _MAPPED_KEYS) or f" (supported: {keys})"
            raise DataError(f"data.columns: unknown key {quoted(key)}{hint}")
        renamed[key] = row[column]
    return renamed


def _near(word: str, words: Sequence[str]) -> str:
    near = difflib.get_close_matches(word[:_COMPARED_KEYS], words, n=1)
    return f": did you mean {quoted(near[0])}?" if near else ""


def detect_format(
    row: Mapping[str, Any], row_format: str = "auto", columns: Mapping[str, str] = _NONE
) -> str:
    """The format of a row by its keys; formats that ``columns`` maps keys of come first.

    Keys with null values count only if the others match no format: tables have all columns in
    every row.
    """
    filled = {key for key, value in row.items() if value is not None}
    for present in (filled, row.keys()):
        for name in sorted(FORMATS, key=lambda name: columns.keys().isdisjoint(FORMATS[name])):
            if row_format in ("auto", name) and present >= set(FORMATS[name]):
                are_lists = name == PAIR and isinstance(row["prompt"], list)
                return CHAT_PAIR if are_lists else name
    formats = FORMATS if row_format == "auto" else {row_format: FORMATS[row_format]}
    needed = "; or ".join(" and ".join(map(quoted, keys)) for keys in formats.values())
    raise DataError(f"a row must have {needed}; its keys are {_keys_of(row)}{_hint(row, formats)}")


def _hint(row: Mapping[str, Any], formats: Mapping[str, tuple[str, ...]]) -> str:
    for name, keys in FORMATS.items():
        if name not in formats and row.keys() >= set(keys):
            return f", which is the format {name!r}: set data.format to {name} or auto"
    if formats is FORMATS and row.keys() >= {"chosen", "rejected"}:
        alone = "messages" if isinstance(row["chosen"], list) else "text"
        key = "completion" if "prompt" in row else alone
        return (
            ": set train.objective: dpo to train on 'chosen' and 'rejected', or data.columns: "
            f"{_in_yaml({key: 'chosen'})} to train on the chosen answers only (init: --columns)"
        )
    for keys in formats.values():
        columns = {key: column for key in keys if (column := _column_for(key, row))}
        if len(columns) == len(keys):
            renamed = {key: column for key, column in columns.items() if key != column}
            return f": set data.columns: {_in_yaml(renamed)} to map them (init: --columns)"
    for key in [key for key in list(row)[:_COMPARED_KEYS] if key not in _KNOWN_KEYS]:
        if near := difflib.get_close_matches(key[:_COMPARED_KEYS], _KNOWN_KEYS, n=1):
            return f" ({quoted(key)} looks like '{near[0]}')"
    if not row:
        return ""
    example = _in_yaml({"text": next(iter(row))[:_COMPARED_KEYS]})
    return f": map them with data.columns, such as {example}"


def _column_for(key: str, row: Mapping[str, Any]) -> str | None:
    """The column that most likely has the content of a format's key."""
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
    """Whether all values of a row are null."""
    return all(value is None for value in row.values())


def weight_of(row: Mapping[str, Any], columns: Mapping[str, str]) -> float:
    """A row's weight in the loss: 1, unless ``data.columns`` maps a column to it."""
    if WEIGHT not in columns:
        return 1.0
    value = row[WEIGHT]
    try:
        weight = float(value) if isinstance(value, Real | str) else math.nan
    except (ValueError, OverflowError):
        weight = math.nan
    if isinstance(value, bool) or not (weight == 0 or NUMBERS[0] <= weight <= NUMBERS[1]):
        raise DataError(
            f"the weight in {quoted(columns[WEIGHT])} must be 0 or a number from {NUMBERS[0]:g} "
            f"to {NUMBERS[1]:g}, got {quoted(value)}"
        )
    return weight


def refuse_loss_masks(row: Mapping[str, Any]) -> None:
    """Refuses columns that other trainers read as a loss mask or as weights of tokens.

    ``labels`` without -100 are ignored: they mask nothing, or are classes of the text.
    """
    for key in sorted(_LOSS_MASKS & row.keys()):
        numbers = _numbers_of(row[key])
        if numbers is None or (key == "labels" and IGNORE_INDEX not in numbers):
            continue
        raise DataError(
            f"the column '{key}' is a loss mask, which is not supported for rows of text: put what "
            "to train on into 'completion', set train: false in the other turns, pass input_ids "
            "and labels to a Trainer, or remove the column"
        )


def _numbers_of(value: Any) -> Any:
    """A list of numbers, possibly as JSON text, as an array; None for everything else."""
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
    """Whether a value is a number or a boolean, or a list of these."""
    try:
        return np.asarray(value).dtype.kind in "iufb"
    except ValueError:  # lists of different lengths
        return False
