"""The rows of files, or of a program, one after the other, as examples of token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from qlora_wgpu.data.chat_template import ChatTemplate
from qlora_wgpu.data.columns import refuse_masks
from qlora_wgpu.data.examples import Counts, document_ids
from qlora_wgpu.data.json_rows import file_parts
from qlora_wgpu.data.messages import as_chat, with_chat_prompt
from qlora_wgpu.data.preferences import (
    JUDGED,
    Answer,
    format_of,
    is_labelled_false,
    judged_of,
    pair_of,
)
from qlora_wgpu.data.prepared import Writer, key_of, learns
from qlora_wgpu.data.row_formats import (
    EmptyRow,
    Encoded,
    RowEncoder,
    detect_format,
    is_blank,
    weight_of,
    with_columns,
)
from qlora_wgpu.data.row_stats import Preparation, Tally
from qlora_wgpu.data.sources import holds_documents, read_rows
from qlora_wgpu.data.splits import RowSlice
from qlora_wgpu.data.tokenizer import Tokenizer
from qlora_wgpu.errors import DataError, QLoRAError, TokenizerError

# ---- rows that are learnt as they are ------------------------------------------------------------


def lasting(rows: Any) -> Any:
    """The rows of an iterator as a list, those of pandas' ``DataFrame`` as mappings.

    Everything else stays as it is.
    """
    if isinstance(rows, Iterator):  # gives each row once, and it is looked at before it is read
        return list(rows)
    if hasattr(rows, "iloc") and hasattr(rows, "columns"):
        return [_without_gaps(row) for row in rows.to_dict("records")]
    return rows


def _without_gaps(row: dict[Any, Any]) -> dict[str, Any]:
    """A row of a table, in which NaN stands where there is no value."""
    gaps = (key for key, value in row.items() if isinstance(value, float) and value != value)
    return {str(key): value for key, value in row.items()} | {str(key): None for key in gaps}


_REPORTED_EVERY = 256  # rows between two reports of progress
_UNREAD = frozenset({"image", "images", "video", "videos", "audio", "audios"})  # as TRL has them
_ROWS_AHEAD = 64  # that are rendered and encoded at once
Row = tuple[str, dict[str, Any], str]  # where it stands, the row, and its format


def _settings(
    how: Preparation, tokenizer: Tokenizer, template: ChatTemplate | None
) -> dict[str, Any]:
    """Everything besides the files that decides how they become tokens."""
    source = template.source if template is not None else ""
    tool_source = template.tool_source if template is not None else None
    return {
        "max_seq_length": how.max_seq_length,
        "row_format": how.row_format,
        "columns": dict(how.columns),
        "train_on": how.train_on,
        "truncation": how.truncation,
        "template": source,
        **({"tool_template": tool_source} if tool_source else {}),
        # Some templates write the date.
        "date": date.today().isoformat() if "strftime_now" in source else "",
        "tokenizer": tokenizer.fingerprint,
        "special_tokens": tokenizer.special_tokens,
        "ends": sorted(tokenizer.eos_token_ids),
        **({"as_chats": True} if how.as_chats else {}),
        **({} if how.objective == "sft" else {"answers": how.objective == "kto"}),
    }


def _not_blank(path: Path) -> Iterator[str]:
    """The parts of a text."""
    blank = True
    for part in file_parts(path):
        blank = blank and not part.strip()
        yield part
    if blank:
        raise DataError(f"{path.name} holds no text")


def _groups(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """So many rows at a time; those before a wrong one come before its error."""
    group: list[Row] = []
    try:
        for row in rows:
            group.append(row)
            if len(group) == _ROWS_AHEAD:
                yield group
                group = []
    except QLoRAError:
        yield group
        raise
    yield group


class RowSource:
    """The files of a data set, and how their rows become examples."""

    def __init__(
        self,
        name: str,
        files: list[Path],
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        how: Preparation,
        progress: Callable[[int], None],
    ) -> None:
        self._name = name
        self._files = files
        self.left_out: Mapping[str, Sequence[str]] = {}
        self.root: Path | None = None
        self.slice: RowSlice | None = None
        self._tokenizer = tokenizer
        self._template = template
        self._how = how
        self._progress = progress
        self._weight = 1.0  # in the loss, of the row that was encoded last
        self._goes_on = False  # whether the example is of the same text as the one before
        self._tally = Tally(name, how, tokenizer, template)

    @property
    def key(self) -> str:
        """A hash of everything that decides what the examples are."""
        settings = _settings(self._how, self._tokenizer, self._template)
        if self.slice is not None:
            settings["slice"] = self.slice.text
        return key_of(self._files, settings)

    @property
    def row_format(self) -> str:
        """The format of the first row that holds anything; documents are text."""
        if holds_documents(self._files):
            return "text"
        return next((name for _, _, name in self._rows() if name), "text")

    def fill(self, writer: Writer) -> tuple[Counts, list[str]]:
        """Adds all examples; returns what became of the rows, and what to tell of it."""
        added = 0
        for ids, labels, _ in self.examples():
            writer.add(ids, labels, self._weight, goes_on=self._goes_on)
            added += 1
        if not added:
            raise DataError(self._tally.nothing())
        return self._tally.counts, self._tally.warnings()

    def examples(self, *, empty: bool = False) -> Iterator[Encoded]:
        """Yields one example after another, and keeps count of what is left out."""
        self._encoder = RowEncoder(self._tokenizer, self._template, self._how.train_on)
        self._tally = Tally(self._name, self._how, self._tokenizer, self._template)
        if holds_documents(self._files):
            yield from self._windows()
        else:
            yield from self._encoded_rows(empty=empty)
        self._progress(self._tally.counts.rows)

    def _windows(self) -> Iterator[Encoded]:
        length = self._how.max_seq_length
        self._tally.has_turns = False
        for path in self._files:
            ids: list[int] = []
            has_windows = False
            for piece in document_ids(self._tokenizer, _not_blank(path)):
                ids += piece
                whole = len(ids) - len(ids) % length
                for begin in range(0, whole, length):
                    yield self._window(ids[begin : begin + length])
                has_windows |= whole > 0
                del ids[:whole]
            if len(ids) > 1:  # the rest; a last token by itself teaches nothing
                yield self._window(ids)
            elif not has_windows:
                raise DataError(
                    f"{path.name} holds fewer than two tokens: there is nothing to learn"
                )

    def _window(self, ids: list[int]) -> Encoded:
        self._tally.read()
        self._tally.unknown(ids)
        return Encoded(ids, list(ids), None)

    def _encoded_rows(self, *, empty: bool) -> Iterator[Encoded]:
        tally = self._tally
        for where, row, row_format in self._rows_ahead():
            tally.read()
            if tally.counts.rows % _REPORTED_EVERY == 0:
                self._progress(tally.counts.rows)
            encoded = self._encoded(where, row, row_format)
            if encoded is None:
                continue
            tally.encoded(encoded, row_format)
            tally.left_out(where, self._encoder.left_out)
            has_windows = self._how.truncation == "windows" and row_format == "text"
            if has_windows and self._weight and len(encoded.ids) > self._how.max_seq_length:
                yield from self._text_windows(encoded)
                continue
            cut = self._cut(encoded, where)
            if cut is None:
                tally.too_long()
            elif not self._weight:
                tally.without_weight()
                if empty:
                    yield cut
            elif not learns(cut.labels):
                if learns(encoded.labels):  # what is cut away
                    tally.without_labels(frozenset())
                else:
                    tally.without_labels(self._encoder.roles, is_spared=self._encoder.is_spared)
                if empty:
                    yield cut
            else:
                is_bad = row_format != "text" and is_labelled_false(row)
                tally.kept(is_cut=cut is not encoded, is_bad=is_bad)
                yield cut

    def _text_windows(self, encoded: Encoded) -> Iterator[Encoded]:
        """A text whole, in as many examples as it takes; a last token by itself teaches nothing."""
        limit, ids = self._how.max_seq_length, encoded.ids
        begins = range(0, len(ids) - 1, limit)
        self._tally.windows(len(begins))
        for begin in begins:
            part = ids[begin : begin + limit]
            self._goes_on = begin > 0
            yield Encoded(part, list(part), None)
        self._goes_on = False

    def _encoded(self, where: str, row: dict[str, Any], row_format: str) -> Encoded | None:
        """A row as tokens, or None where it holds nothing."""
        try:
            if not row_format:
                raise EmptyRow("the row has no value")
            self._weight = weight_of(row, self._how.columns)
            return self._encoder.encode(row, row_format)
        except EmptyRow:
            self._tally.empty(where)
            return None
        except DataError as err:
            raise DataError(f"{where}: {err}") from err
        except TokenizerError as err:
            raise TokenizerError(f"{where}: {err}") from err

    def _cut(self, encoded: Encoded, where: str) -> Encoded | None:
        """The part of a row that is kept, or None if nothing is."""
        limit, truncation = self._how.max_seq_length, self._how.truncation
        if len(encoded.ids) <= limit:
            return encoded
        if truncation == "error":
            raise DataError(
                f"{where}: it has {len(encoded.ids)} tokens, more than max_seq_length={limit}, and "
                "data.truncation is error"
            )
        if truncation == "drop":
            return None
        kept = slice(-limit, None) if truncation == "keep_end" else slice(limit)
        ids = encoded.ids[kept]
        return Encoded(ids, encoded.labels[kept], None)

    def _rows_ahead(self) -> Iterator[Row]:
        """The rows, of which some have been encoded at once."""
        for rows in _groups(self._rows()):
            self._encoder.look_ahead(self._to_encode(rows))
            yield from rows

    def _to_encode(self, rows: list[Row]) -> list[tuple[dict[str, Any], str]]:
        """What the encoder will be given of these rows."""
        return [(row, row_format) for _, row, row_format in rows if row_format]

    def _rows(self) -> Iterator[Row]:
        """Rows, where each stands, and their format, which all share; none where one is blank."""
        row_format: str | None = None
        first = ""
        for where, given in self._chosen():
            if is_blank(given):
                yield where, given, ""
                continue
            try:
                refuse_masks(given)
                row = with_columns(given, self._how.columns)
                row, own_format = self._as_wanted(row, self._format_of(row))
                if row_format is None:
                    row_format, first = own_format, where
                elif own_format != row_format:
                    raise DataError(
                        f"a row of the format '{own_format}' stands among rows of "
                        f"'{row_format}' ({first}): give each format its own file"
                    )
            except DataError as err:
                raise DataError(f"{where}: {err}") from err
            for column in _UNREAD & given.keys():
                if given[column]:
                    self._tally.unread(where, column)
            yield where, row, row_format

    def _chosen(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The rows of all files, of which a slice may be asked for."""
        if self.slice is None:
            yield from self._all()
            return
        begin, end = self.slice.of(lambda: sum(1 for _ in self._all()))
        rows = islice(self._all(), begin, max(begin, end))
        first = next(rows, None)
        if first is None:
            raise DataError(f"{self._name} has no row in the slice {self.slice.text}")
        yield first
        yield from rows

    def _all(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for path in self._files:
            yield from self._read(path)

    def _format_of(self, row: dict[str, Any]) -> str:
        """The format of a row."""
        return detect_format(row, self._how.row_format, self._how.columns)

    def _as_wanted(self, row: dict[str, Any], row_format: str) -> tuple[dict[str, Any], str]:
        """A row and its format, as turns of a chat where this is asked for."""
        return as_chat(row, row_format) if self._how.as_chats else (row, row_format)

    def _read(self, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
        """The rows of a file, and where each stands."""
        inside = "" if self.root is None else self._place(path, self.root)
        try:
            for where, row in read_rows(path):
                yield inside + where, row
        except DataError as err:
            if not inside or not str(err).startswith(path.name):
                raise
            raise DataError(f"{inside}{err}") from err

    def _place(self, path: Path, root: Path) -> str:
        """What stands before the name of a folder's file."""
        return "".join(f"{part}/" for part in (self._name, *path.relative_to(root).parent.parts))


class RowsInMemory(RowSource):
    """Rows that stand in no file."""

    rows: Sequence[Mapping[str, Any]] = ()  # the rows

    def _read(self, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
        for index, row in enumerate(self.rows):
            where = f"{self._name}[{index}]"
            if not isinstance(row, Mapping):
                raise DataError(f"{where} must be a mapping, got {type(row).__name__}")
            yield where, dict(row)


# ---- rows with answers ---------------------------------------------------------------------------

SAID = {
    "dpo": ("chosen", "rejected"),
    "orpo": ("chosen", "rejected"),
    "kto": ("desirable", "undesirable"),
}
"""What is said of the two answers of a row, by ``train.objective``."""


class EncodedAnswer(Encoded):
    """An answer of a row as tokens."""

    said: str = ""  # what is said of it

    @classmethod
    def of(cls, encoded: Encoded, said: str) -> EncodedAnswer:
        """One of which that is said."""
        answer = cls(*encoded)
        answer.said = said
        return answer


_NOTHING = Encoded([], [], "")


def unit_of(how: Preparation) -> int:
    """How many examples make a row."""
    return 1 if how.objective == "sft" else 2


class AnswerSource(RowSource):
    """Files of rows with answers.

    Each row makes two examples, what is good in front. Where a row judges one answer alone, the
    other's place is empty.
    """

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
