"""The rows of files, one after the other, as examples of token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

from qlora_wgpu.data.chat import ChatTemplate
from qlora_wgpu.data.columns import refuse_masks
from qlora_wgpu.data.examples import Counts
from qlora_wgpu.data.formats import (
    EmptyRow,
    Encoded,
    RowEncoder,
    detect_format,
    is_blank,
    weight_of,
    with_columns,
)
from qlora_wgpu.data.long_text import document_ids
from qlora_wgpu.data.messages import as_chat
from qlora_wgpu.data.preferences import is_labelled_false
from qlora_wgpu.data.preparation import Preparation
from qlora_wgpu.data.prepared import Writer, key_of, learns
from qlora_wgpu.data.sources import holds_documents, read_rows
from qlora_wgpu.data.splits import RowSlice
from qlora_wgpu.data.tally import Tally
from qlora_wgpu.data.text_file import file_parts
from qlora_wgpu.data.tokenizer import Tokenizer
from qlora_wgpu.errors import DataError, QLoRAError, TokenizerError

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
    """The parts of a text.

    Raises:
        DataError: If it cannot be read, or holds nothing but white space.
    """
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
        """Yields one example after another, and keeps count of what is left out.

        Args:
            empty: Whether those with nothing to learn are yielded, too.
        """
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
        """The rows of all files, of which a slice may be asked for.

        Raises:
            DataError: If the slice holds none.
        """
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
        """The format of a row.

        Raises:
            DataError: If it has none.
        """
        return detect_format(row, self._how.row_format, self._how.columns)

    def _as_wanted(self, row: dict[str, Any], row_format: str) -> tuple[dict[str, Any], str]:
        """A row and its format, as turns of a chat where this is asked for.

        Raises:
            DataError: If it holds no such turns.
        """
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
    """Rows that stand in no file.

    Attributes:
        rows: The rows.
    """

    rows: Sequence[Mapping[str, Any]] = ()

    def _read(self, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
        for index, row in enumerate(self.rows):
            where = f"{self._name}[{index}]"
            if not isinstance(row, Mapping):
                raise DataError(f"{where} must be a mapping, got {type(row).__name__}")
            yield where, dict(row)
