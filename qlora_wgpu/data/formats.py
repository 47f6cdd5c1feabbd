"""Formats of rows, and their encoding as token ids and labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from qlora_wgpu.data.alpaca import alpaca_prompt
from qlora_wgpu.data.chat import ChatTemplate
from qlora_wgpu.data.columns import (
    CHATS,
    FORMATS,
    EmptyRow,
    detect_format,
    is_blank,
    weight_of,
    with_columns,
)
from qlora_wgpu.data.learnt_turns import TrainOn
from qlora_wgpu.data.long_text import document_ids, size_of
from qlora_wgpu.data.row_texts import RowText, RowTexts
from qlora_wgpu.data.spans import tokens_in_spans
from qlora_wgpu.data.tokenizer import Tokenizer, Tokens
from qlora_wgpu.errors import DataError, TokenizerError
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.limits import MAX_AT_ONCE

__all__ = [
    "CHATS",
    "FORMATS",
    "EmptyRow",
    "Encoded",
    "RowEncoder",
    "TrainOn",
    "alpaca_prompt",
    "detect_format",
    "is_blank",
    "weight_of",
    "with_columns",
]

_AHEAD = 1 << 17  # characters that become tokens at once; a last row may double it


class Encoded(NamedTuple):
    """A row as tokens.

    Attributes:
        ids: Its token ids.
        labels: Equally many: the ids that are learnt, and -100.
        text: The text that they stand for; None where the row was cut, since few ask for it.
    """

    ids: list[int]
    labels: list[int]
    text: str | None


@dataclass
class _Ready:
    """A row that has been written, and perhaps encoded."""

    row: Mapping[str, Any]  # so that its id is no other's
    written: RowText
    tokens: Tokens | None = None

    def adds(self, special_tokens: bool) -> bool:
        """Whether its text, which is not too long, becomes tokens with special ones or without."""
        text, adds = self.written.text, self.written.add_special_tokens
        return adds == special_tokens and len(text) <= _AHEAD


class RowEncoder:
    """Turns rows into token ids and labels.

    Labels are the ids themselves where the model learns and -100 elsewhere; they are not shifted.
    What is learnt is ``train_on``: in chats the assistant's turns (auto, assistant) or the last of
    them (last_turn, completion), in rows with an answer the answer, and of a ``text`` all; or (all)
    everything. Messages that say that they are not learnt (``weight: 0``, ``train: false``) are not
    in any case, and with auto and assistant others are that say ``train: true``. Except in chats,
    where the template decides, the tokenizer's special tokens are added in front (never a second
    beginning-of-sequence token) and the end-of-sequence token behind, which is learnt.

    Attributes:
        roles: Roles in the conversation encoded last; none for another row.
        is_spared: Whether messages of it that would be learnt say that they are not.
        left_out: What of that conversation the template leaves out, in words.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        train_on: TrainOn = "auto",
        *,
        heeds_marks: bool = True,
    ) -> None:
        """Builds an encoder.

        Args:
            tokenizer: The model's tokenizer.
            template: The chat template, or None if there is none.
            train_on: The tokens that are learnt.
            heeds_marks: Whether messages decide by what they say of themselves.
        """
        self._tokenizer = tokenizer
        self._texts = RowTexts(tokenizer, template, train_on, heeds_marks=heeds_marks)
        self.roles: frozenset[str] = frozenset()
        self.is_spared = False
        self.left_out: frozenset[str] = frozenset()
        self._ready: dict[int, _Ready] = {}

    def encode(self, row: Mapping[str, Any], row_format: str) -> Encoded:
        """Encodes a row of a known format.

        Returns:
            Ids and labels of equal length, and the text.

        Raises:
            EmptyRow: If the row holds nothing but white space.
            DataError: If a value of the row is missing or of the wrong type, or the chat template
                cannot take it.
            TokenizerError: If its text cannot be encoded.
        """
        ready = self._ready.pop(id(row), None)
        if ready is None:
            ready = _Ready(row, self._texts.write(row, row_format))
        written = ready.written
        self.roles, self.is_spared = written.roles, written.is_spared
        self.left_out = written.left_out
        return self._encoded(written, ready.tokens or self._tokens(written))

    def look_ahead(self, rows: Sequence[tuple[Mapping[str, Any], str]]) -> None:
        """Encodes rows that ``encode`` will be asked for next, on all processors.

        Args:
            rows: The very rows, and their formats. What is wrong with one is told when it is
                encoded.
        """
        self._texts.look_ahead(rows)
        self._ready = {}
        if not self._tokenizer.encodes_at_once:
            return
        size = 0
        for row, row_format in rows:
            try:
                ready = _Ready(row, self._texts.write(row, row_format))
            except (DataError, TokenizerError, KeyError):
                continue
            self._ready[id(row)] = ready
            size += len(ready.written.text)
            if size > _AHEAD:
                break
        for special in (False, True):
            self._encode_ahead([r for r in self._ready.values() if r.adds(special)], special)

    def _encode_ahead(self, rows: Sequence[_Ready], add_special_tokens: bool) -> None:
        try:
            texts = [row.written.text for row in rows]
            tokens = self._tokenizer.encode_batch(texts, add_special_tokens)
        except TokenizerError:  # one by one, each has its own error
            return
        for row, its_tokens in zip(rows, tokens, strict=True):
            row.tokens = its_tokens

    def _tokens(self, written: RowText) -> Tokens:
        text, special = written.text, written.add_special_tokens
        if size_of(text) <= MAX_AT_ONCE:
            return self._tokenizer.encode_with_offsets(text, special)
        pieces = document_ids(self._tokenizer, [text], special)
        return [i for piece in pieces for i in piece], []

    def _encoded(self, written: RowText, tokens: Tokens) -> Encoded:
        ids, offsets = tokens
        labels = list(ids)
        if written.spans is not None:
            learnt = tokens_in_spans(offsets, written.spans)
            labels = np.where(learnt, ids, IGNORE_INDEX).tolist()
        eos = self._tokenizer.eos_token_id
        if written.is_ended and eos is not None:
            if not ids or ids[-1] != eos:
                ids.append(eos)
                labels.append(eos)
            labels[-1] = eos
        return Encoded(ids, labels, written.text)
