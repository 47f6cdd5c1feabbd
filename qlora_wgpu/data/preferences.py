"""Rows that compare answers, or judge them, as prompts and answers: in the forms that files have.

A prompt is a text or messages; so is an answer. Messages may be ShareGPT's turns, and an answer one
message alone. A prompt that is not told by itself is what both answers begin with.
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
from qlora_wgpu.errors import DataError

PAIRS, JUDGED = "chosen/rejected", "prompt/completion/label"
_JUDGEMENTS = {"true": True, "1": True, "false": False, "0": False}
_PROMPTS = ("prompt", "messages", "conversations", "conversation")

Message = dict[str, Any]


class Answer(NamedTuple):
    """A prompt with an answer, in a form that ``RowEncoder`` takes, and which form that is."""

    row: dict[str, Any]
    row_format: str


def format_of(row: Mapping[str, Any], objective: str) -> str:
    """Which of the two forms a row has, by its keys."""
    filled = {key for key, value in row.items() if value is not None}
    for present in (filled, row.keys()):  # a table has all columns in every row
        if present >= {"chosen", "rejected"}:
            return PAIRS
        if present >= {"completion", "label"} and objective == "kto":
            return JUDGED
    keys = ", ".join(f"'{key}'" for key in list(row)[:8]) or "none"
    needed = "'chosen' and 'rejected'"
    if objective == "kto":
        needed = f"'prompt', 'completion' and 'label'; or {needed}"
    raise DataError(
        f"train.objective: {objective} learns from rows with the keys {needed}; this one's are "
        f"{keys}: data.columns says which of them is what"
    )


def pair_of(row: Mapping[str, Any]) -> tuple[Answer, Answer]:
    """The chosen answer and the rejected one."""
    chosen, rejected = _side(row, "chosen"), _side(row, "rejected")
    prompt = _prompt(row, chosen, rejected)
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError("'chosen' and 'rejected' must both be text, or both messages")
    if isinstance(chosen, str) and isinstance(rejected, str):
        if prompt is None:
            prompt, chosen, rejected = _shared_text(chosen, rejected)
        return _with_prompt(row, prompt, chosen), _with_prompt(row, prompt, rejected)
    if isinstance(prompt, str):  # beside whole conversations it is told twice
        prompt = [] if len(chosen) > 1 else [{"role": "user", "content": prompt}]
    before, other = [*(prompt or []), *chosen[:-1]], [*(prompt or []), *rejected[:-1]]
    if [*map(without_flags, before)] != [*map(without_flags, other)]:
        raise DataError(
            "'chosen' and 'rejected' differ before their last messages: what is compared are two "
            "answers to the same messages"
        )
    return _with_prompt(row, before, chosen[-1:]), _with_prompt(row, before, rejected[-1:])


def unpaired_preference(row: Mapping[str, Any]) -> tuple[Answer, bool]:
    """An answer, and whether it is good."""
    label = row["label"]
    if label is None:
        raise EmptyRow("'label' is missing")
    is_good = judgement(label)
    if is_good is None:
        raise DataError(f"'label' must be true or false, got {kind_of(label)}")
    completion = _side(row, "completion")
    prompt = _prompt(row, completion)
    if prompt is None:  # beside a whole conversation none is needed
        if isinstance(completion, str) or len(completion) < 2:
            raise DataError("a row with 'completion' and 'label' needs a 'prompt', too")
        prompt = []
    if isinstance(completion, str):
        return _with_prompt(row, prompt, completion), is_good
    if isinstance(prompt, str):  # beside a whole conversation it is told twice
        prompt = [] if len(completion) > 1 else [{"role": "user", "content": prompt}]
    before = [*prompt, *completion[:-1]]
    return _with_prompt(row, before, completion[-1:]), is_good


def judgement(label: object) -> bool | None:
    """Whether a label calls an answer good; None where it is no label of answers.

    Tables without types have words: ``true`` and ``false``.
    """
    if isinstance(label, str):
        return _JUDGEMENTS.get(label.strip().lower())
    return bool(label) if label in (0, 1) else None


def is_labelled_false(row: Mapping[str, Any]) -> bool:
    """Whether a row says of itself that it is bad; a 0 may be the label of anything."""
    label = row.get("label")
    return label is False or (isinstance(label, str) and label.strip().lower() == "false")


def _with_prompt(
    row: Mapping[str, Any], prompt: str | Sequence[Message], answer: str | Sequence[Message]
) -> Answer:
    if isinstance(answer, str):
        if not answer.strip():
            raise EmptyRow("an answer holds nothing but white space")
        if isinstance(prompt, str):
            return Answer({"prompt": prompt, "completion": answer}, "prompt/completion")
        answer = [{"role": "assistant", "content": answer}]
    if answer[-1]["role"] != "assistant":
        raise DataError(
            f"an answer must end with a message of the assistant, got one of {answer[-1]['role']!r}"
        )
    assert not isinstance(prompt, str)
    messages = with_system([*prompt, *answer], row)
    if len(messages) < 2:
        raise DataError("an answer has no prompt: a message of the user must come before it")
    besides = {key: row.get(key) for key in ("tools", "chat_template_kwargs")}
    return Answer({"messages": messages, **besides}, "messages")


def _prompt(row: Mapping[str, Any], *answers: str | list[Message]) -> str | list[Message] | None:
    """What comes before the answers; a conversation that ``data.columns`` makes one is none."""
    for key in _PROMPTS:
        if row.get(key) is not None:
            side = _side(row, key)
            if isinstance(side, str) or len(side) == 1 or side not in answers:
                return side
    return None


def _side(row: Mapping[str, Any], key: str) -> str | list[Message]:
    """A text, or messages."""
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
    return checked_messages(turns, key)


def _shared_text(chosen: str, rejected: str) -> tuple[str, str, str]:
    """What two texts begin with alike, and what they go on with."""
    pairs = zip(chosen, rejected, strict=False)
    length = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(chosen), len(rejected)))
    if length and length < min(len(chosen), len(rejected)) and chosen[length - 1] == " ":
        length -= 1  # the space belongs to the answers
    return chosen[:length], chosen[length:], rejected[length:]
