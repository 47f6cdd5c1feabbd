"""Rows with prompts alone, for objectives whose completions are sampled and scored.

A prompt is text or messages; all other columns are arguments of the reward functions. If a row
already has an answer (``completion``, or a last message of the assistant), it becomes the column
``answer``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from qlora_wgpu.data.columns import EmptyRow
from qlora_wgpu.data.examples import Counts, Dataset, Example
from qlora_wgpu.data.messages import (
    checked_messages,
    first_holds,
    from_json,
    from_sharegpt,
    kind_of,
    with_system,
)
from qlora_wgpu.data.prompts import PromptFormat
from qlora_wgpu.data.row_formats import TokenizedExample
from qlora_wgpu.data.row_source import RowSource
from qlora_wgpu.errors import DataError, QLoRAError
from qlora_wgpu.labels import IGNORE_INDEX

_KEYS = ("prompt", "messages", "conversations")
_ANSWER = "answer"


@dataclass(frozen=True)
class PromptRow:
    """A prompt as reward functions get it."""

    prompt: Any  # text or messages
    columns: Mapping[str, Any] = field(default_factory=dict)  # the row's other columns


class PromptDataset(Dataset):
    """Prompts as examples without labels, with their rows."""

    def __init__(
        self, examples: Sequence[Example], rows: Sequence[PromptRow], counts: Counts,
        warnings: Sequence[str],
    ) -> None:  # fmt: skip
        super().__init__(examples, counts, warnings)
        self._rows = rows

    def prompt_row(self, number: int) -> PromptRow:
        """The row of a prompt."""
        return self._rows[number]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all prompts and columns."""
        digest = hashlib.sha256()
        for array in (self._ends, self._ids):
            digest.update(np.ascontiguousarray(array).data)
        for row in self._rows:
            digest.update(json.dumps([row.prompt, row.columns], default=str).encode())
        return digest.hexdigest()[:16]


class PromptSource(RowSource):
    """The prompts of a data set."""

    def dataset(self) -> PromptDataset:
        """Reads and encodes all prompts."""
        examples, rows, dropped, empty, longest = [], [], 0, 0, 0
        limit, number = self.how.max_seq_length, 0
        for where, made in self._prompts():
            number += 1
            if made is None:
                empty += 1
                continue
            ids, row = made
            longest = max(longest, len(ids))
            if len(ids) > limit:
                if self.how.truncation == "error":
                    raise DataError(
                        f"{where}: its prompt has {len(ids)} tokens, more than "
                        f"max_seq_length={limit}, and data.truncation is error"
                    )
                dropped += 1
                continue
            examples.append(_example(ids))
            rows.append(row)
        self.progress(number)
        if not examples:
            why = "no rows with a prompt" if not dropped else (
                f"only prompts of more than max_seq_length={limit} tokens (the longest has "
                f"{longest})"
            )  # fmt: skip
            raise DataError(f"{self.name} has {why}")
        warnings = []
        if dropped:
            warnings.append(
                f"{self.name}: {dropped:,} of {number:,} prompts have more than "
                f"data.max_seq_length = {limit} tokens and are dropped; the longest has {longest:,}"
            )
        if empty:
            warnings.append(f"{self.name}: {empty:,} of {number:,} rows have no prompt")
        return PromptDataset(examples, rows, Counts(number, 0, dropped, 0, empty), warnings)

    def examples(self) -> Iterator[TokenizedExample]:
        """Yields all prompts, with labels that mask every token."""
        for _, made in self._prompts():
            if made is not None:
                ids = made[0]
                text = self.tokenizer.decode(ids, skip_special_tokens=False)
                yield TokenizedExample(ids, [IGNORE_INDEX] * len(ids), text)

    def _prompts(self) -> Iterator[tuple[str, tuple[list[int], PromptRow] | None]]:
        formats: dict[str, PromptFormat] = {}
        for where, row, row_format in self._formatted():
            if not row_format:
                yield where, None
                continue
            if row_format not in formats:
                setting = self.how.chat_template
                formats[row_format] = PromptFormat.of_rows(row_format, self.tokenizer, setting)
                if row_format == "messages" and formats[row_format].template is None:
                    raise DataError(
                        f"{where}: the prompts are messages but the tokenizer has no chat "
                        "template: set data.chat_template"
                    )
            try:
                yield where, _encoded(row, formats[row_format])
            except EmptyRow:
                yield where, None
            except QLoRAError as err:
                raise DataError(f"{where}: {err}") from err

    def _format_of(self, row: dict[str, Any]) -> str:
        key = next((key for key in _KEYS if row.get(key) is not None), None)
        if key is None:
            names = ", ".join(f"'{name}'" for name in list(row)[:8]) or "none"
            raise DataError(
                f"train.objective: {self.how.objective} requires rows with a 'prompt' or with "
                f"'messages', got {names}: map another column with data.columns, such as "
                "{prompt: question}"
            )
        return "text" if isinstance(from_json(row[key]), str) else "messages"

    def _converted(self, row: dict[str, Any], row_format: str) -> tuple[dict[str, Any], str]:
        """A row and its format, converted to a chat with ``data.apply_chat_template``."""
        if self.how.as_chats and row_format == "text":
            turns = [{"role": "user", "content": row["prompt"]}]
            return {**row, "prompt": turns}, "messages"
        return row, row_format


def _example(ids: Sequence[int]) -> Example:
    array = np.array(ids, np.int32)
    return Example(array, np.full(len(ids), IGNORE_INDEX, np.int32))


def _encoded(row: Mapping[str, Any], how: PromptFormat) -> tuple[list[int], PromptRow]:
    """The tokens of a prompt, and its row."""
    key = next(key for key in _KEYS if row.get(key) is not None)
    columns = {name: value for name, value in row.items() if name not in _KEYS}
    prompt, answer = from_json(row[key]), columns.pop("completion", None)
    if isinstance(answer, list) and answer and isinstance(answer[-1], Mapping):
        answer = answer[-1].get("content")
    if isinstance(prompt, str):
        if not prompt.strip():
            raise EmptyRow("the prompt has no text")
        ids = how.ids([{"role": "user", "content": prompt}])
    else:
        if not isinstance(prompt, list):
            raise DataError(f"'{key}' must be text or messages, got {kind_of(prompt)}")
        prompt = from_sharegpt(prompt) if first_holds(prompt, "from") else checked_messages(
            prompt, key
        )  # fmt: skip
        if prompt and prompt[-1]["role"] == "assistant":
            answer = prompt[-1].get("content")
            prompt = prompt[:-1]
        if not prompt:
            raise EmptyRow("there is no message before the answer")
        prompt = with_system(prompt, row)
        ids = how.ids(prompt, row.get("tools"), row.get("chat_template_kwargs"))
    if answer is not None:
        columns.setdefault(_ANSWER, answer)
    return ids, PromptRow(prompt, columns)
