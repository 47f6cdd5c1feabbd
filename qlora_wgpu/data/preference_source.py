"""The rows of files that compare or judge answers, as examples: two for each row, side by side.

Of a row that judges one answer the other's place is empty: in front stands what is good.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import cycle
from typing import Any

from qlora_wgpu.data.examples import Counts
from qlora_wgpu.data.formats import EmptyRow, Encoded, RowEncoder
from qlora_wgpu.data.messages import with_chat_prompt
from qlora_wgpu.data.preferences import JUDGED, Answer, format_of, judged_of, pair_of
from qlora_wgpu.data.preparation import Preparation
from qlora_wgpu.data.prepared import Writer, learns
from qlora_wgpu.data.row_source import Row, RowsInMemory, RowSource
from qlora_wgpu.data.sources import holds_documents
from qlora_wgpu.data.tally import Tally
from qlora_wgpu.errors import DataError, TokenizerError

SAID = {
    "dpo": ("chosen", "rejected"),
    "orpo": ("chosen", "rejected"),
    "kto": ("desirable", "undesirable"),
}
"""What is said of the two answers of a row, by ``train.objective``."""


class EncodedAnswer(Encoded):
    """An answer of a row as tokens.

    Attributes:
        said: What is said of it.
    """

    said: str = ""

    @classmethod
    def of(cls, encoded: Encoded, said: str) -> EncodedAnswer:
        """One of which that is said."""
        answer = cls(*encoded)
        answer.said = said
        return answer


_NOTHING = Encoded([], [], "")
_REPORTED_EVERY = 256  # rows between two reports of progress


def unit_of(how: Preparation) -> int:
    """How many examples make a row."""
    return 1 if how.objective == "sft" else 2


class AnswerSource(RowSource):
    """Files of rows with answers."""

    _keeps_places = False
    _known: Mapping[int, tuple[Answer | None, Answer | None]] = {}  # of rows that come next

    @property
    def row_format(self) -> str:
        """How prompts of the first row are written: as a chat (messages), or as text."""
        self._refuse_documents()
        for where, row, _ in self._rows():
            try:
                return next(answer.row_format for answer in self._answers(row) if answer)
            except EmptyRow:  # is left out
                continue
            except DataError as err:
                raise DataError(f"{where}: {err}") from err
        return "messages"

    def fill(self, writer: Writer) -> tuple[Counts, list[str]]:
        """Adds all examples, an empty one where a row has one answer."""
        self._keeps_places = True
        try:
            return super().fill(writer)
        finally:
            self._keeps_places = False

    def examples(self, *, empty: bool = False) -> Iterator[Encoded]:
        """Yields one example after another: the answers of each row."""
        self._refuse_documents()
        self._encoder = RowEncoder(self._tokenizer, self._template, "last_turn", heeds_marks=False)
        self._tally = Tally(self._name, self._how, self._tokenizer, self._template)
        for where, row, row_format in self._rows_ahead():
            self._tally.read()
            if self._tally.counts.rows % _REPORTED_EVERY == 0:
                self._progress(self._tally.counts.rows)
            sides = self._sides(where, row, row_format, empty=empty)
            for side, said in zip(sides, cycle(SAID[self._how.objective]), strict=False):
                if side.ids or self._keeps_places:
                    yield EncodedAnswer.of(side, said)
        self._progress(self._tally.counts.rows)

    def _refuse_documents(self) -> None:
        if holds_documents(self._files):
            raise DataError(
                f"{self._name} is text, but train.objective: {self._how.objective} learns from "
                "rows with answers"
            )

    def _format_of(self, row: dict[str, Any]) -> str:
        return format_of(row, self._how.objective)

    def _as_wanted(self, row: dict[str, Any], row_format: str) -> tuple[dict[str, Any], str]:
        return with_chat_prompt(row) if self._how.as_chats else row, row_format

    def _answers(self, row: dict[str, Any]) -> tuple[Answer | None, Answer | None]:
        """What is good, and what is not."""
        if self._format_of(row) != JUDGED:
            return pair_of(row)
        answer, is_good = judged_of(row)
        return (answer, None) if is_good else (None, answer)

    def _to_encode(self, rows: list[Row]) -> list[tuple[dict[str, Any], str]]:
        known = {}
        for _, row, row_format in rows:
            with suppress(DataError):  # told when its turn comes
                if row_format:
                    known[id(row)] = self._answers(row)
        self._known = known
        return [(a.row, a.row_format) for answers in known.values() for a in answers if a]

    def _sides(
        self, where: str, row: dict[str, Any], row_format: str, *, empty: bool
    ) -> list[Encoded]:
        """A row's examples with the places between them; none where one is of no use.

        An answer that is cut away whole takes the row with it, since nothing would be compared.
        """
        try:
            answers: tuple[Answer | None, Answer | None] = (None, None)
            if row_format:
                answers = self._known.get(id(row)) or self._answers(row)
            whole, is_spared, left_out = self._encoded_answers(answers)
        except DataError as err:
            if isinstance(err, EmptyRow):
                self._tally.empty(where)
                return []
            raise DataError(f"{where}: {err}") from err
        except TokenizerError as err:
            raise TokenizerError(f"{where}: {err}") from err
        given = [side for side in whole if side.ids]
        if not given:
            self._tally.empty(where)
            return []
        self._tally.left_out(where, left_out)
        for answer, side in zip(answers, whole, strict=True):
            if answer is not None:
                self._tally.encoded(side, answer.row_format)
        cut = [self._cut(side, where) if side.ids else _NOTHING for side in whole]
        kept = [side for side in cut if side is not None]
        if len(kept) < len(whole):
            self._tally.too_long()
            return []
        if any(not learns(side.labels) for side in kept if side.ids):
            self._tally.without_labels(self._encoder.roles)
            return kept if empty else []
        is_cut = any(a is not b for a, b in zip(kept, whole, strict=True))
        self._tally.kept(is_cut=is_cut, is_spared=is_spared)
        if len(given) == 2 and kept[0].ids == kept[1].ids:  # TRL keeps such rows, too
            self._tally.same_answers(where)
        # KTO learns from each answer of a pair by itself.
        if self._how.objective == "kto" and len(given) == 2:
            return [kept[0], _NOTHING, _NOTHING, kept[1]]
        return kept

    def _encoded_answers(
        self, answers: tuple[Answer | None, Answer | None]
    ) -> tuple[list[Encoded], bool, set[str]]:
        """Answers as tokens, whether one says that it is not learnt, and what is left out."""
        left_out: set[str] = set()
        encoded, is_spared = [], False
        for answer in answers:
            if answer is None:
                encoded.append(_NOTHING)
                continue
            encoded.append(self._encoder.encode(*answer))
            is_spared |= self._encoder.is_spared
            left_out |= self._encoder.left_out
        return encoded, is_spared, left_out


class AnswersInMemory(AnswerSource, RowsInMemory):
    """Rows with answers that stand in no file."""
