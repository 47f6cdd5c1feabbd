"""Rows of prompts and answers that are text, as turns of a chat: ``data.apply_chat_template``.

So mlx-lm has its prompts and completions, LLaMA-Factory its instructions and torchtune its
instruct data sets. A row of messages, and a text without an answer, stay what they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qlora_wgpu.data.alpaca import history_of
from qlora_wgpu.data.columns import INSTRUCTION, PAIR

_ANSWERS = {PAIR: "completion", INSTRUCTION: "output"}


def as_chat(row: Mapping[str, Any], row_format: str) -> tuple[dict[str, Any], str]:
    """A row and its format, with messages in place of its prompt and its answer.

    An ``input`` stands in a line of its own behind its ``instruction``, and a ``history`` of
    earlier instructions and answers before both.

    Raises:
        DataError: If the history is none.
    """
    answer = _ANSWERS.get(row_format)
    if answer is None:
        return dict(row), row_format
    messages = [*_prompt(row, row_format), {"role": "assistant", "content": row[answer]}]
    return {**row, "messages": messages}, "messages"


def with_chat_prompt(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with answers that are compared or judged, with a message in place of a text's prompt.

    Raises:
        DataError: If the history is none.
    """
    named = PAIR if row.get("prompt") is not None else INSTRUCTION
    if not isinstance(row.get("prompt", row.get("instruction")), str):
        return dict(row)
    answers = {
        key: [{"role": "assistant", "content": row[key]}]
        for key in ("chosen", "rejected", "completion")
        if isinstance(row.get(key), str)
    }
    return {**row, **answers, "prompt": _prompt(row, named)}


def _prompt(row: Mapping[str, Any], row_format: str) -> list[dict[str, Any]]:
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
