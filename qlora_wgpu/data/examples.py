"""Examples as token ids and labels, and data sets of them in flat arrays."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from qlora_wgpu.data.tokenizer import Tokenizer
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.limits import MAX_AT_ONCE
from qlora_wgpu.mapped_files import is_mapped, release_pages

# ---- long texts, piece by piece ------------------------------------------------------------------

# Before a word that begins a line: there, tokenizers that split text at all split it, too.
_SEAM = re.compile(r"\n(?=\S)")


def pieces_of(parts: Iterable[str]) -> Iterator[str]:
    """Cuts a text, which comes in parts, into pieces for a tokenizer: one, unless it is large.

    They have at most ``MAX_AT_ONCE`` bytes and end where a line does, if there is one.
    """
    rest = ""
    for part in parts:
        rest += part
        while len(rest) > MAX_AT_ONCE or size_of(rest) > MAX_AT_ONCE:
            end = _seam(rest)
            yield rest[:end]
            rest = rest[end:]
    yield rest


def document_ids(
    tokenizer: Tokenizer, parts: Iterable[str], add_special_tokens: bool = True
) -> Iterator[list[int]]:
    """Token ids of a document, which comes in any parts, piece by piece.

    With ``add_special_tokens`` the document, not every piece, begins and ends as tokenizers do.
    """
    pieces = pieces_of(parts)
    piece = next(pieces)
    following = next(pieces, None)
    if following is None:
        yield tokenizer.encode(piece, add_special_tokens)
        return
    front, back = tokenizer.added_around if add_special_tokens else ([], [])
    yield [*front, *tokenizer.encode(piece, False)]
    while following is not None:
        piece, following = following, next(pieces, None)
        yield [*tokenizer.encode(piece, False), *(back if following is None else ())]


def size_of(text: str) -> int:
    """Bytes of a text."""
    return len(text) if text.isascii() else len(_bytes(text))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # the tokenizer says what is wrong with it


def _seam(text: str) -> int:
    """Where the first piece of a text ends: after its last line, else its last word that fits."""
    longest = len(_bytes(text)[:MAX_AT_ONCE].decode("utf-8", "ignore"))
    head = text[: longest + 1]
    seams = [match.end() for match in _SEAM.finditer(head, longest // 2)]
    return next((end for end in reversed(seams) if end <= longest), 0) or (
        head.rfind(" ", longest // 2, longest) if " " in head[longest // 2 : longest] else longest
    )


# ---- examples and data sets ----------------------------------------------------------------------

_AT_ONCE = 1 << 20  # tokens that are looked at together
_HELD = 1 << 23  # tokens whose pages stay in this process's memory


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One sequence of tokens with its labels.

    Attributes:
        input_ids: Token ids, int32, shape (length,).
        labels: The same ids where the model learns and -100 elsewhere, int32, shape (length,). Not
            shifted: position i is predicted from the positions before it, so label 0 has no effect.
        weight: That of each of its tokens in the loss, which is divided by the sum of all weights.
    """

    input_ids: npt.NDArray[np.int32]
    labels: npt.NDArray[np.int32]
    weight: float = 1.0

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def num_label_tokens(self) -> int:
        """Number of positions that the loss is taken over."""
        return int(np.count_nonzero(self.labels[1:] != IGNORE_INDEX))


@dataclass(frozen=True)
class Counts:
    """Counts of what became of the rows of a source.

    Attributes:
        rows: All of them.
        truncated: Examples that were cut to the maximum length.
        dropped: Rows that were left out because they are too long.
        without_labels: Rows that were left out because nothing in them is learnt.
        empty: Rows that were left out because they hold nothing.
    """

    rows: int = 0
    truncated: int = 0
    dropped: int = 0
    without_labels: int = 0
    empty: int = 0


class Dataset(Sequence[Example]):
    """Examples in the order of their source, in arrays that may be mapped from a file.

    Attributes:
        counts: Counts of what became of the source's rows.
        warnings: Sentences for the user about what was cut or left out.
        left_out: Names of the source's files that belong to other splits, by their split.
        source_names: Names of the data sets in a mixture; none for a single data set.
        source_sizes: How many rows each of these has.
        unit: How many examples make one row: 2 where a chosen answer and a rejected one stand side
            by side, of which one may be empty.
    """

    unit: int = 1
    left_out: Mapping[str, Sequence[str]] = MappingProxyType({})
    source_names: tuple[str, ...] = ()
    source_sizes: tuple[int, ...] = ()

    def __init__(
        self,
        examples: Sequence[Example] = (),
        counts: Counts | None = None,
        warnings: Sequence[str] = (),
    ) -> None:
        """Copies examples into arrays.

        Args:
            examples: The examples to copy.
            counts: Counts of what became of the source's rows; by default each example is a row.
            warnings: About it.
        """
        lengths = np.array([len(e) for e in examples], np.int64)
        none = np.zeros(0, np.int32)
        self._ids = np.concatenate([none, *(e.input_ids for e in examples)])
        self._labels = np.concatenate([none, *(e.labels for e in examples)])
        self._ends = np.cumsum(lengths)
        self._weights = np.array([e.weight for e in examples], np.float32)
        self._goes_on = np.zeros(len(examples), np.uint8)
        self._looked_at = 0  # tokens, since pages were let go of
        self.counts = counts or Counts(rows=len(examples))
        self.warnings = tuple(warnings)

    @classmethod
    def of_arrays(
        cls,
        ids: npt.NDArray[np.int32],
        labels: npt.NDArray[np.int32],
        ends: npt.NDArray[np.int64],
        counts: Counts,
        warnings: Sequence[str],
        weights: npt.NDArray[np.float32] | None = None,
        goes_on: npt.NDArray[np.uint8] | None = None,
    ) -> Dataset:
        """Takes all ids and labels, one example after the other, and where each ends.

        ``goes_on`` is 1 where an example goes on with the text of the one before.
        """
        dataset = cls((), counts, warnings)
        dataset._ids, dataset._labels, dataset._ends = ids, labels, ends
        dataset._weights = np.ones(len(ends), np.float32) if weights is None else weights
        dataset._goes_on = np.zeros(len(ends), np.uint8) if goes_on is None else goes_on
        return dataset

    def __repr__(self) -> str:
        return (
            f"Dataset({len(self):,} examples, {self.num_tokens:,} tokens, "
            f"{self.num_label_tokens:,} learnt)"
        )

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(index)
        return self._at(number)

    def _at(self, number: int) -> Example:
        first = int(self._ends[number - 1]) if number else 0
        end = int(self._ends[number])
        ids, labels = np.asarray(self._ids[first:end]), np.asarray(self._labels[first:end])
        weight = float(self._weights[number])
        if not self._is_mapped:
            return Example(ids, labels, weight)
        self._looked_at += len(ids)
        example = Example(ids.copy(), labels.copy(), weight)
        if self._looked_at > _HELD:
            self._looked_at = 0
            release_pages(self._ids)
            release_pages(self._labels)
        return example

    @cached_property
    def _is_mapped(self) -> bool:
        return is_mapped(self._ids)

    def _parts(self) -> Iterator[tuple[int, int]]:
        """First and last number of examples that are looked at together."""
        first = 0
        while first < len(self):
            begin = int(self._ends[first - 1]) if first else 0
            last = int(np.searchsorted(self._ends, begin + _AT_ONCE, "right"))
            yield first, (first := max(last, first + 1))

    def _pieces(self, array: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
        """An array, a piece at a time, of which only one is in memory where it is mapped."""
        for first in range(0, len(array), _AT_ONCE):
            piece = array[first : first + _AT_ONCE]
            yield piece
            release_pages(piece)

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each example."""
        return np.diff(self._ends, prepend=0)

    @cached_property
    def label_counts(self) -> npt.NDArray[np.int64]:
        """Positions of each example that the loss is taken over."""
        counts = np.zeros(len(self), np.int64)
        for first, last in self._parts():
            ends = self._ends[first:last]
            begins = ends - self.lengths[first:last]
            labels = np.asarray(self._labels[begins[0] : ends[-1]])
            learnt = labels != IGNORE_INDEX
            release_pages(labels)
            learnt[(begins - begins[0])[ends > begins]] = False
            before = np.concatenate([[0], np.cumsum(learnt)])
            counts[first:last] = before[ends - begins[0]] - before[begins - begins[0]]
        return counts

    @cached_property
    def text_numbers(self) -> npt.NDArray[np.int64]:
        """The number of each example's row: windows of one text have the same, and so do pairs."""
        texts = np.cumsum(self._goes_on[:: self.unit] == 0, dtype=np.int64) - 1
        return np.repeat(texts, self.unit)

    @property
    def has_windows(self) -> bool:
        """Whether several rows are of one text: its windows, or what a mixture repeats of it."""
        return len(np.unique(self.text_numbers)) < self.num_rows

    @property
    def num_label_tokens(self) -> int:
        """Positions that the loss is taken over, in all examples together."""
        return int(self.label_counts.sum())

    @property
    def num_rows(self) -> int:
        """Rows that the examples make: pairs count once."""
        return len(self) // self.unit

    @property
    def num_tokens(self) -> int:
        """Tokens of all examples together."""
        return len(self._ids)

    @property
    def longest(self) -> int:
        """Length of the longest example, in tokens."""
        return int(self.lengths.max(initial=0))

    @cached_property
    def max_token_id(self) -> int:
        """Largest token id, to be compared with the model's vocabulary; -1 if there is none."""
        return max((int(piece.max()) for piece in self._pieces(self._ids)), default=-1)

    @property
    def source_of(self) -> npt.NDArray[np.int32] | None:
        """The number of each example's data set, in ``source_names``; None without a mixture."""
        return None

    @property
    def num_truncated(self) -> int:
        """Examples that were cut to the maximum length."""
        return self.counts.truncated

    @property
    def num_without_labels(self) -> int:
        """Rows that were left out because nothing in them is learnt."""
        return self.counts.without_labels

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all ids, labels, lengths and weights: equal for equal data."""
        digest = hashlib.sha256()
        for array in (self._ends, self._ids, self._labels):
            for piece in self._pieces(array):
                digest.update(np.ascontiguousarray(piece).data)
        if (self._weights != 1).any():
            digest.update(np.ascontiguousarray(self._weights).data)
        return digest.hexdigest()[:16]
