"""Rows of files or of a program as examples: supervised ones, and those with answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from qlora_wgpu.data.chat_template import ChatTemplate
from qlora_wgpu.data.columns import (
    EmptyRow,
    detect_format,
    is_blank,
    refuse_loss_masks,
    weight_of,
    with_columns,
)
from qlora_wgpu.data.examples import Counts, document_ids
from qlora_wgpu.data.json_rows import file_parts
from qlora_wgpu.data.messages import as_chat, with_chat_prompt
from qlora_wgpu.data.preferences import (
    UNPAIRED,
    Answer,
    format_of,
    is_labelled_false,
    pair_of,
    unpaired_preference,
)
from qlora_wgpu.data.prepared import DatasetWriter, has_labels
from qlora_wgpu.data.row_formats import RowEncoder, TokenizedExample, encoded_or_raised
from qlora_wgpu.data.row_images import COLUMNS as IMAGE_COLUMNS
from qlora_wgpu.data.row_images import has_images, located
from qlora_wgpu.data.row_stats import PreprocessConfig, RowStats
from qlora_wgpu.data.sources import read_rows
from qlora_wgpu.data.splits import SplitFiles
from qlora_wgpu.data.tokenizer import Tokenizer
from qlora_wgpu.errors import DataError, QLoRAError
from qlora_wgpu.labels import IGNORE_INDEX

# ---- supervised rows -----------------------------------------------------------------------------


def materialize(rows: Any) -> Any:
    """An iterator as a list, and pandas' ``DataFrame`` as mappings; others are unchanged."""
    if isinstance(rows, Iterator):  # rows are read more than once
        return list(rows)
    if hasattr(rows, "iloc") and hasattr(rows, "columns"):
        return [_without_gaps(row) for row in rows.to_dict("records")]
    return rows


def _without_gaps(row: dict[Any, Any]) -> dict[str, Any]:
    """A row of a table with None in place of NaN."""
    gaps = (key for key, value in row.items() if isinstance(value, float) and value != value)
    return {str(key): value for key, value in row.items()} | {str(key): None for key in gaps}


_REPORTED_EVERY = 256  # rows between two reports of progress
_OTHER_MEDIA = frozenset({"video", "videos", "audio", "audios"})  # TRL's columns
_MEDIA = _OTHER_MEDIA | set(IMAGE_COLUMNS)
_READS_IMAGES = ("sft", "dpo", "orpo", "kto")  # objectives
_AT_ONCE = 64  # rows that are rendered and encoded together
Placed = tuple[str, dict[str, Any]]  # a row's location, and the row
Row = tuple[str, dict[str, Any], str]  # ... and its format
Rows = Callable[[], Iterator[Placed]]


def rows_of_files(selection: SplitFiles, *, images: Sequence[str] = ()) -> Iterator[Placed]:
    """The rows of all files, or a slice of them, with their locations.

    If ``images`` names columns, images in tables are read, and the paths of others are completed.
    """
    if selection.rows is None:
        yield from _rows_of_all(selection, images=images)
        return
    begin, end = selection.rows.of(lambda: sum(1 for _ in _rows_of_all(selection, images=())))
    rows = islice(_rows_of_all(selection, images=images), begin, max(begin, end))
    first = next(rows, None)
    if first is None:
        raise DataError(f"{selection.name} has no rows in the slice {selection.rows.text}")
    yield first
    yield from rows


def _rows_of_all(selection: SplitFiles, *, images: Sequence[str]) -> Iterator[Placed]:
    for path in selection.files:
        folders = () if selection.root is None else path.relative_to(selection.root).parent.parts
        inside = "" if selection.root is None else "/".join((selection.name, *folders, ""))
        try:
            for where, row in read_rows(path, with_bytes=bool(images)):
                yield inside + where, located(row, path.parent, images) if images else row
        except DataError as err:
            if not inside or not str(err).startswith(path.name):
                raise
            raise DataError(f"{inside}{err}") from err


def rows_in_memory(rows: Any, name: str) -> Iterator[Placed]:
    """Rows of a program, located by their indices."""
    for index, row in enumerate(rows):
        where = f"{name}[{index}]"
        if not isinstance(row, Mapping):
            raise DataError(f"{where} must be a mapping, got {type(row).__name__}")
        yield where, dict(row)


def _not_blank(path: Path) -> Iterator[str]:
    blank = True
    for part in file_parts(path):
        blank = blank and not part.strip()
        yield part
    if blank:
        raise DataError(f"{path.name} has no text")


def groups_of(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Batches of rows; those before an invalid row are yielded before its error."""
    group: list[Row] = []
    try:
        for row in rows:
            group.append(row)
            if len(group) == _AT_ONCE:
                yield group
                group = []
    except QLoRAError:
        yield group
        raise
    yield group


@dataclass
class RowSource:
    """The rows of a data set, and how they become examples."""

    name: str  # the data set's, for messages
    rows: Rows  # reads the rows from the first one
    documents: Sequence[Path]  # text files in place of rows
    tokenizer: Tokenizer
    template: ChatTemplate | None
    how: PreprocessConfig
    progress: Callable[[int], None] = lambda rows: None

    def __post_init__(self) -> None:
        self._tally = RowStats(self.name, self.how, self.tokenizer, self.template)

    @property
    def row_format(self) -> str:
        """The format of the first row that is not blank; documents are text."""
        if self.documents:
            return "text"
        return next((name for _, _, name in self._formatted() if name), "text")

    def fill(self, writer: DatasetWriter) -> tuple[Counts, list[str]]:
        """Adds all examples; returns the counts of the rows and the warnings."""
        added = 0
        for each in self._examples(empty=False):
            writer.add(
                each.ids,
                each.labels,
                each.weight,
                continues=each.continues,
                images=each.images,
                targets=each.targets,
            )
            added += 1
        if not added:
            raise DataError(self._tally.no_examples())
        return self._tally.counts, self._tally.warnings()

    def examples(self) -> Iterator[TokenizedExample]:
        """Yields all examples, including those without labels."""
        return self._examples(empty=True)

    def _examples(self, *, empty: bool) -> Iterator[TokenizedExample]:
        self._tally = RowStats(self.name, self.how, self.tokenizer, self.template)
        yield from self._windows() if self.documents else self._encoded_rows(empty=empty)
        self.progress(self._tally.num["rows"])

    def _windows(self) -> Iterator[TokenizedExample]:
        length = self.how.max_seq_length
        self._tally.has_turns = False
        for path in self.documents:
            ids: list[int] = []
            has_windows = False
            for piece in document_ids(self.tokenizer, _not_blank(path)):
                ids += piece
                whole = len(ids) - len(ids) % length
                for begin in range(0, whole, length):
                    yield self._window(ids[begin : begin + length])
                has_windows |= whole > 0
                del ids[:whole]
            if len(ids) > 1:  # the rest; a single token has nothing to predict
                yield self._window(ids)
            elif not has_windows:
                raise DataError(f"{path.name} has fewer than two tokens: nothing to train on")

    def _window(self, ids: list[int]) -> TokenizedExample:
        self._tally.count("rows")
        self._tally.unknown(ids)
        return TokenizedExample(ids, list(ids))

    def _encoded_rows(self, *, empty: bool) -> Iterator[TokenizedExample]:
        encoder = RowEncoder(
            self.tokenizer, self.template, self.how.train_on, images=self.how.images
        )
        for rows in groups_of(self._formatted()):
            encoded = encoder.encode_many([(row, row_format) for _, row, row_format in rows])
            for (where, row, row_format), each in zip(rows, encoded, strict=True):
                self._read()
                weight = 1.0
                try:
                    if row_format:
                        weight = weight_of(row, self.how.columns)
                except DataError as err:
                    each = err
                if isinstance(each, EmptyRow):
                    self._tally.count("empty", where)
                    continue
                made = encoded_or_raised(each, where)
                is_rejected = row_format != "text" and is_labelled_false(row)
                self._tally.encoded(made, row_format)
                self._tally.left_out(where, made.left_out)
                made = replace(made, weight=weight)
                yield from self._kept(where, made, row_format, is_rejected, empty)

    def _read(self) -> None:
        self._tally.count("rows")
        if self._tally.num["rows"] % _REPORTED_EVERY == 0:
            self.progress(self._tally.num["rows"])

    def _kept(
        self, where: str, encoded: TokenizedExample, row_format: str, is_rejected: bool, empty: bool
    ) -> Iterator[TokenizedExample]:
        """The examples of a row; with ``empty`` also if it has no labels."""
        tally, limit = self._tally, self.how.max_seq_length
        is_text = row_format == "text" and not encoded.images
        has_windows = self.how.truncation == "windows" and is_text
        if has_windows and encoded.weight and len(encoded.ids) > limit:
            yield from self._text_windows(encoded)
            return
        cut = self._cut(encoded, where)
        if cut is None:
            tally.count("dropped")
        elif encoded.weight and has_labels(cut.labels):
            tally.count("truncated", by=cut is not encoded)
            tally.count("rejected", by=is_rejected)
            yield cut
        else:
            if not encoded.weight:
                tally.count("zero weight")
            elif has_labels(encoded.labels):  # all of them were truncated
                tally.without_labels(frozenset())
            else:
                tally.without_labels(encoded.roles, has_excluded=encoded.has_excluded)
            if empty:
                yield cut

    def _text_windows(self, encoded: TokenizedExample) -> Iterator[TokenizedExample]:
        """All windows of a text; a last one of a single token has nothing to predict."""
        limit, ids = self.how.max_seq_length, encoded.ids
        begins = range(0, len(ids) - 1, limit)
        self._tally.count("long texts")
        self._tally.count("windows", by=len(begins))
        for begin in begins:
            part = ids[begin : begin + limit]
            yield TokenizedExample(part, list(part), weight=encoded.weight, continues=begin > 0)

    def _cut(self, encoded: TokenizedExample, where: str) -> TokenizedExample | None:
        """A row within the maximum length, or None if it is dropped."""
        limit, truncation = self.how.max_seq_length, self.how.truncation
        if len(encoded.ids) <= limit:
            return encoded
        if truncation == "error":
            raise DataError(
                f"{where}: it has {len(encoded.ids)} tokens, more than max_seq_length={limit}, and "
                "data.truncation is error"
            )
        if truncation == "drop":
            return None
        length = len(encoded.ids)
        first, last = (length - limit, length) if truncation == "keep_end" else (0, limit)
        if encoded.images and not first <= encoded.image_span[0] <= encoded.image_span[1] <= last:
            return None  # an image cannot be truncated
        kept = slice(first, last)
        return replace(encoded, ids=encoded.ids[kept], labels=encoded.labels[kept], text=None)

    def _formatted(self) -> Iterator[Row]:
        """Rows with their locations and their common format; a blank row's format is empty."""
        row_format: str | None = None
        first = ""
        for where, given in self.rows():
            if is_blank(given):
                yield where, given, ""
                continue
            try:
                refuse_loss_masks(given)
                row = with_columns(given, self.how.columns)
                self._refuse_images(row)
                row, own_format = self._converted(row, self._format_of(row))
                if row_format is None:
                    row_format, first = own_format, where
                elif own_format != row_format:
                    raise DataError(
                        f"its format is '{own_format}', but that of the rows before it is "
                        f"'{row_format}' ({first}): use a separate file for each format"
                    )
            except DataError as err:
                raise DataError(f"{where}: {err}") from err
            for column in (_MEDIA if self.how.images is None else _OTHER_MEDIA) & given.keys():
                if given[column]:
                    self._tally.unread(where, column)
            yield where, row, row_format

    def _refuse_images(self, row: dict[str, Any]) -> None:
        if self.how.objective in _READS_IMAGES or self.how.images is None:
            return
        if has_images(row):
            raise DataError(
                f"train.objective: {self.how.objective} does not support rows with images "
                f"(supported: {', '.join(_READS_IMAGES)})"
            )

    def _format_of(self, row: dict[str, Any]) -> str:
        return detect_format(row, self.how.row_format, self.how.columns)

    def _converted(self, row: dict[str, Any], row_format: str) -> tuple[dict[str, Any], str]:
        """A row and its format, converted to a chat with ``data.apply_chat_template``."""
        return as_chat(row, row_format) if self.how.as_chats else (row, row_format)


# ---- rows with answers ---------------------------------------------------------------------------

ANSWER_NAMES = {
    "dpo": ("chosen", "rejected"),
    "orpo": ("chosen", "rejected"),
    "kto": ("desirable", "undesirable"),
    "reward": ("chosen", "rejected"),
}
"""Names of the two answers of a row, by ``train.objective``."""

_NOTHING = TokenizedExample([], [])
Answers = tuple[Answer | None, Answer | None]  # chosen and rejected, or one of them


def unit_of(how: PreprocessConfig) -> int:
    """The number of examples in a row."""
    return 2 if how.objective in ANSWER_NAMES else 1


class AnswerSource(RowSource):
    """Rows with answers: each becomes a chosen and a rejected example; one may be empty."""

    @property
    def row_format(self) -> str:
        """The format of the first row's prompt: messages or text."""
        for where, row, row_format in self._formatted():
            answers = self._answers(row, row_format)
            if isinstance(answers, EmptyRow):
                continue
            if isinstance(answers, DataError):
                raise DataError(f"{where}: {answers}") from answers
            return next(answer.row_format for answer in answers if answer)
        return "messages"

    def examples(self) -> Iterator[TokenizedExample]:
        """Yields the answers of each row."""
        return (each for each in super().examples() if each.ids)

    def _encoded_rows(self, *, empty: bool) -> Iterator[TokenizedExample]:
        encoder = self._encoder()
        for rows in groups_of(self._formatted()):
            answers = [self._answers(row, row_format) for _, row, row_format in rows]
            pairs = [each for each in answers if not isinstance(each, DataError)]
            encoded = encoder.encode_many([a for pair in pairs for a in pair if a is not None])
            for (where, row, _), each in zip(rows, answers, strict=True):
                self._read()
                if isinstance(each, EmptyRow):
                    self._tally.count("empty", where)
                    continue
                if isinstance(each, DataError):
                    raise DataError(f"{where}: {each}") from each
                made = [_NOTHING if a is None else next(encoded) for a in each]
                sides = self._sides(where, each, made, empty=empty)
                names = cycle(ANSWER_NAMES[self.how.objective])
                for side, name in zip(sides, names, strict=False):
                    yield self._finished(row, side, name)

    def _encoder(self) -> RowEncoder:
        return RowEncoder(
            self.tokenizer, self.template, "last_turn", use_flags=False, images=self.how.images
        )

    def _finished(
        self, row: Mapping[str, Any], side: TokenizedExample, name: str
    ) -> TokenizedExample:
        return replace(side, answer=name)

    def _format_of(self, row: dict[str, Any]) -> str:
        return format_of(row, self.how.objective)

    def _converted(self, row: dict[str, Any], row_format: str) -> tuple[dict[str, Any], str]:
        return with_chat_prompt(row) if self.how.as_chats else row, row_format

    def _answers(self, row: dict[str, Any], row_format: str) -> Answers | DataError:
        try:
            if not row_format:
                return EmptyRow("the row has no value")
            reads = self.how.images is not None
            if row_format != UNPAIRED:
                return pair_of(row, images=reads)
            answer, is_desirable = unpaired_preference(row, images=reads)
            return (answer, None) if is_desirable else (None, answer)
        except DataError as err:
            return err

    def _sides(
        self,
        where: str,
        answers: Answers,
        made: list[TokenizedExample | QLoRAError],
        *,
        empty: bool,
    ) -> list[TokenizedExample]:
        """A row's examples; none if one of them cannot be used or is truncated entirely."""
        wrong = next((each for each in made if isinstance(each, QLoRAError)), None)
        if isinstance(wrong, EmptyRow):
            self._tally.count("empty", where)
            return []
        whole = [encoded_or_raised(each, where) for each in made]
        given = [side for side in whole if side.ids]
        if not given:
            self._tally.count("empty", where)
            return []
        if any(_has_answer_image(side) for side in given):
            raise DataError(f"{where}: an answer has an image: put images into the prompt")
        left_out = {what for side in whole for what in side.left_out}
        self._tally.left_out(where, sorted(left_out))
        for answer, side in zip(answers, whole, strict=True):
            if answer is not None:
                self._tally.encoded(side, answer.row_format)
        cut = [self._cut(side, where) for side in whole]
        kept = [side for side in cut if side is not None]
        if len(kept) < len(whole):
            self._tally.count("dropped")
            return []
        if any(not has_labels(side.labels) for side in kept if side.ids):
            self._tally.without_labels(given[-1].roles)
            return kept if empty else []
        self._tally.count("truncated", by=any(a is not b for a, b in zip(kept, whole, strict=True)))
        self._tally.count("excluded turns", by=any(side.has_excluded for side in whole))
        if len(given) == 2 and kept[0].ids == kept[1].ids:  # TRL keeps such rows, too
            self._tally.count("equal answers", where)
        # KTO takes each answer of a pair as a row of its own.
        if self.how.objective == "kto" and len(given) == 2:
            return [kept[0], _NOTHING, _NOTHING, kept[1]]
        return kept


def _has_answer_image(side: TokenizedExample) -> bool:
    first = next((i for i, label in enumerate(side.labels) if label != IGNORE_INDEX), 0)
    return bool(side.images) and side.image_span[1] > first > 0
