"""Preference rows, paired or with a label, as prompts and answers.

Prompts and answers are text or messages (also ShareGPT's turns, or a single message as the answer).
Without a prompt, the common beginning of both answers is the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from qlora_wgpu.data.columns import EmptyRow
from qlora_wgpu.data.conversations import without_flags
from qlora_wgpu.data.messages import (
    checked_messages,
    first_holds,
    from_json,
    from_sharegpt,
    kind_of,
    with_system,
)
from qlora_wgpu.data.row_images import COLUMNS as IMAGE_COLUMNS
from qlora_wgpu.errors import DataError

PAIRED, UNPAIRED = "chosen/rejected", "prompt/completion/label"
_LABELS = {"true": True, "1": True, "false": False, "0": False}
_PROMPT_KEYS = ("prompt", "messages", "conversations", "conversation")

Message = dict[str, Any]


class Answer(NamedTuple):
    """A prompt with an answer, as a row and its format for ``RowEncoder``."""

    row: dict[str, Any]
    row_format: str


def format_of(row: Mapping[str, Any], objective: str) -> str:
    """Whether a row is paired or unpaired, by its keys."""
    filled = {key for key, value in row.items() if value is not None}
    for present in (filled, row.keys()):  # a table has all columns in every row
        if present >= {"chosen", "rejected"}:
            return PAIRED
        if present >= {"completion", "label"} and objective == "kto":
            return UNPAIRED
    keys = ", ".join(f"'{key}'" for key in list(row)[:8]) or "none"
    needed = "'chosen' and 'rejected'"
    if objective == "kto":
        needed = f"'prompt', 'completion' and 'label'; or {needed}"
    raise DataError(
        f"train.objective: {objective} requires rows with {needed}, got {keys}: map other "
        "columns with data.columns"
    )


def pair_of(row: Mapping[str, Any], *, images: bool = False) -> tuple[Answer, Answer]:
    """The chosen and the rejected answer; with ``images``, messages may have some."""
    chosen, rejected = (side_of(row, key, images=images) for key in ("chosen", "rejected"))
    prompt = prompt_of(row, chosen, rejected, images=images)
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError("'chosen' and 'rejected' must both be text or both be messages")
    if isinstance(chosen, str) and isinstance(rejected, str):
        if prompt is None:
            prompt, chosen, rejected = _shared_text(chosen, rejected)
        return _with_prompt(row, prompt, chosen), _with_prompt(row, prompt, rejected)
    if isinstance(prompt, str):  # whole conversations contain it already
        prompt = [] if len(chosen) > 1 else [{"role": "user", "content": prompt}]
    before, other = [*(prompt or []), *chosen[:-1]], [*(prompt or []), *rejected[:-1]]
    if [*map(without_flags, before)] != [*map(without_flags, other)]:
        raise DataError(
            "'chosen' and 'rejected' differ before their last messages: they must be answers to "
            "the same messages"
        )
    return _with_prompt(row, before, chosen[-1:]), _with_prompt(row, before, rejected[-1:])


def unpaired_preference(row: Mapping[str, Any], *, images: bool = False) -> tuple[Answer, bool]:
    """An answer, and whether it is desirable; with ``images``, messages may have some."""
    label = row["label"]
    if label is None:
        raise EmptyRow("'label' is missing")
    is_desirable = as_label(label)
    if is_desirable is None:
        raise DataError(f"'label' must be true or false, got {kind_of(label)}")
    completion = side_of(row, "completion", images=images)
    prompt = prompt_of(row, completion, images=images)
    if prompt is None:  # a whole conversation needs none
        if isinstance(completion, str) or len(completion) < 2:
            raise DataError("a row with 'completion' and 'label' must have a 'prompt'")
        prompt = []
    if isinstance(completion, str):
        return _with_prompt(row, prompt, completion), is_desirable
    if isinstance(prompt, str):  # a whole conversation contains it already
        prompt = [] if len(completion) > 1 else [{"role": "user", "content": prompt}]
    before = [*prompt, *completion[:-1]]
    return _with_prompt(row, before, completion[-1:]), is_desirable


def as_label(label: object) -> bool | None:
    """The boolean of a label, also as text of a table; None if it is not a boolean."""
    if isinstance(label, str):
        return _LABELS.get(label.strip().lower())
    return bool(label) if label in (0, 1) else None


def is_labelled_false(row: Mapping[str, Any]) -> bool:
    """Whether a row has ``label: false``; 0 may be a class of anything."""
    label = row.get("label")
    return label is False or (isinstance(label, str) and label.strip().lower() == "false")


def _with_prompt(
    row: Mapping[str, Any], prompt: str | Sequence[Message], answer: str | Sequence[Message]
) -> Answer:
    if isinstance(answer, str):
        if not answer.strip():
            raise EmptyRow("an answer has only white space")
        if isinstance(prompt, str):
            text = {"prompt": prompt, "completion": answer, **_images(row)}
            return Answer(text, "prompt/completion")
        answer = [{"role": "assistant", "content": answer}]
    if answer[-1]["role"] != "assistant":
        raise DataError(
            f"an answer must end with a message of the role 'assistant', got {answer[-1]['role']!r}"
        )
    assert not isinstance(prompt, str)
    messages = with_system([*prompt, *answer], row)
    if len(messages) < 2:
        raise DataError("an answer has no prompt: put a message of the user before it")
    options = {key: row.get(key) for key in ("tools", "chat_template_kwargs")}
    return Answer({"messages": messages, **options, **_images(row)}, "messages")


def _images(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: row[key] for key in IMAGE_COLUMNS if row.get(key) is not None}


def prompt_of(
    row: Mapping[str, Any], *answers: str | list[Message], images: bool = False
) -> str | list[Message] | None:
    """The prompt, unless it is a conversation that ``data.columns`` maps to an answer."""
    for key in _PROMPT_KEYS:
        if row.get(key) is not None:
            side = side_of(row, key, images=images)
            if isinstance(side, str) or len(side) == 1 or side not in answers:
                return side
    return None


def side_of(row: Mapping[str, Any], key: str, *, images: bool = False) -> str | list[Message]:
    """The text or the messages of a column."""
    value = from_json(row[key])
    if value is None:
        raise EmptyRow(f"'{key}' is missing")
    if isinstance(value, str):
        return value
    turns = [value] if isinstance(value, Mapping) else value
    if not isinstance(turns, list):
        raise DataError(f"'{key}' must be text or messages, got {kind_of(value)}")
    if first_holds(turns, "from"):
        return from_sharegpt(turns)
    return checked_messages(turns, key, images=images)


def _shared_text(chosen: str, rejected: str) -> tuple[str, str, str]:
    """The common beginning of two texts, and the rest of each."""
    pairs = zip(chosen, rejected, strict=False)
    length = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(chosen), len(rejected)))
    if length and length < min(len(chosen), len(rejected)) and chosen[length - 1] == " ":
        length -= 1  # a space belongs to the answers
    return chosen[:length], chosen[length:], rejected[length:]
