"""Examples as token ids and labels, and data sets of examples in flat arrays."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from qlora_wgpu.data.tokenizer import Tokenizer
from qlora_wgpu.images.sources import ImageSource, RowContent
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.limits import MAX_AT_ONCE
from qlora_wgpu.mapped_files import is_mapped, release_pages

# ---- long documents, piece by piece --------------------------------------------------------------

# Before a word at the beginning of a line: pre-tokenizers split there, too.
_SEAM = re.compile(r"\n(?=\S)")


def pieces_of(parts: Iterable[str]) -> Iterator[str]:
    """Splits a document into pieces of at most ``MAX_AT_ONCE`` bytes, at line ends if possible."""
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
    """Tokenizes a document piece by piece; special tokens are added around the whole document."""
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
    """Size of a text in bytes."""
    return len(text) if text.isascii() else len(_bytes(text))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # the tokenizer reports surrogates


def _seam(text: str) -> int:
    """The end of the first piece: after the last line that fits, or else the last word."""
    longest = len(_bytes(text)[:MAX_AT_ONCE].decode("utf-8", "ignore"))
    head = text[: longest + 1]
    seams = [match.end() for match in _SEAM.finditer(head, longest // 2)]
    return next((end for end in reversed(seams) if end <= longest), 0) or (
        head.rfind(" ", longest // 2, longest) if " " in head[longest // 2 : longest] else longest
    )


# ---- examples and data sets ----------------------------------------------------------------------

_AT_ONCE = 1 << 20  # tokens that are processed together
_RESIDENT = 1 << 23  # tokens whose pages may stay in this process's memory


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One sequence of tokens with its labels.

    Attributes:
        input_ids: Token ids, int32, shape (length,).
        labels: The same ids where the loss is taken and -100 elsewhere, int32, shape (length,). Not
            shifted: position i is predicted from the positions before it, so label 0 has no effect.
        weight: The weight of its tokens in the loss, which is divided by the sum of all weights.
        images: Keys of its images in ``Dataset.image_sources``, in the order of their placeholders.
        targets: What a reward model or classifier is trained on, float32: the margin of a chosen
            sequence, a class, or a number for each class; None for other objectives.
    """

    input_ids: npt.NDArray[np.int32]
    labels: npt.NDArray[np.int32]
    weight: float = 1.0
    images: tuple[str, ...] = ()
    targets: npt.NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def num_label_tokens(self) -> int:
        """Number of tokens that the loss is taken on."""
        return int(np.count_nonzero(self.labels[1:] != IGNORE_INDEX))


@dataclass(frozen=True)
class Counts:
    """Counts of a source's rows.

    Attributes:
        rows: All rows.
        truncated: Examples truncated to the maximum length.
        dropped: Rows dropped because they are too long.
        without_labels: Rows dropped because no loss would be taken on them.
        empty: Rows skipped because they have no content.
    """

    rows: int = 0
    truncated: int = 0
    dropped: int = 0
    without_labels: int = 0
    empty: int = 0


@dataclass(frozen=True, eq=False)
class ImageTable:
    """The images of a data set's examples."""

    sources: Sequence[ImageSource] = ()  # each once
    numbers: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    # The end of each example in ``numbers``, which are indices of the sources
    ends: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    @classmethod
    def of(cls, images: Sequence[Sequence[str]]) -> ImageTable:
        """The table of examples that have only the keys of their images."""
        numbers = {key: number for number, key in enumerate(dict.fromkeys(chain(*images)))}
        return cls(
            [ImageSource(f"image {key[:8]}", RowContent(b""), key) for key in numbers],
            np.array([numbers[key] for own in images for key in own], np.int32),
            np.cumsum([len(own) for own in images], dtype=np.int64),
        )

    def keys(self, example: int) -> tuple[str, ...]:
        """The keys of an example's images."""
        if not self.sources:
            return ()
        first = int(self.ends[example - 1]) if example else 0
        numbers = self.numbers[first : int(self.ends[example])]
        return tuple(self.sources[number].key for number in numbers.tolist())


class Dataset(Sequence[Example]):
    """Examples in the order of their source, in arrays that may be memory-mapped.

    Attributes:
        counts: Counts of the source's rows.
        warnings: Warnings for the user, such as how many rows were truncated.
        left_out: The source's files that belong to other splits, by split.
        source_names: Names of the data sets in a mixture; empty for a single data set.
        source_sizes: The number of rows in each of them.
        unit: The number of examples in a row: 2 for a chosen and a rejected answer, of which one
            may be empty.
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
            counts: Counts of the source's rows; by default each example is a row.
            warnings: Warnings for the user.
        """
        lengths = np.array([len(e) for e in examples], np.int64)
        none = np.zeros(0, np.int32)
        self._ids = np.concatenate([none, *(e.input_ids for e in examples)])
        self._labels = np.concatenate([none, *(e.labels for e in examples)])
        self._ends = np.cumsum(lengths)
        self._weights = np.array([e.weight for e in examples], np.float32)
        self._continues = np.zeros(len(examples), np.uint8)
        self._images = ImageTable.of([e.images for e in examples])
        given = [each.targets for each in examples if each.targets is not None]
        self._targets = np.stack(given) if given else None
        self._tokens_read = 0  # since mapped pages were released
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
        continues: npt.NDArray[np.uint8] | None = None,
        images: ImageTable | None = None,
        targets: npt.NDArray[np.float32] | None = None,
    ) -> Dataset:
        """Wraps concatenated ids and labels, and the end of each example.

        ``continues`` is 1 for an example that is another window of the document before it.
        """
        dataset = cls((), counts, warnings)
        dataset._ids, dataset._labels, dataset._ends = ids, labels, ends
        dataset._weights = np.ones(len(ends), np.float32) if weights is None else weights
        dataset._continues = np.zeros(len(ends), np.uint8) if continues is None else continues
        dataset._images = images or ImageTable()
        if targets is not None and len(targets):  # of all examples, equally many
            dataset._targets = targets.reshape(len(ends), -1)
        return dataset

    def __repr__(self) -> str:
        return (
            f"Dataset({len(self):,} examples, {self.num_tokens:,} tokens, "
            f"{self.num_label_tokens:,} trained on)"
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
        weight, images = float(self._weights[number]), self._images.keys(number)
        targets = None if self._targets is None else np.array(self._targets[number])
        if not self._is_mapped:
            return Example(ids, labels, weight, images, targets)
        self._tokens_read += len(ids)
        example = Example(ids.copy(), labels.copy(), weight, images, targets)
        if self._tokens_read > _RESIDENT:
            self._tokens_read = 0
            release_pages(self._ids)
            release_pages(self._labels)
        return example

    @cached_property
    def _is_mapped(self) -> bool:
        return is_mapped(self._ids)

    def _parts(self) -> Iterator[tuple[int, int]]:
        first = 0
        while first < len(self):
            begin = int(self._ends[first - 1]) if first else 0
            last = int(np.searchsorted(self._ends, begin + _AT_ONCE, "right"))
            yield first, (first := max(last, first + 1))

    def _pieces(self, array: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
        """Pieces of an array; of a mapped array only one is in memory at a time."""
        for first in range(0, len(array), _AT_ONCE):
            piece = array[first : first + _AT_ONCE]
            yield piece
            release_pages(piece)

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Number of tokens of each example."""
        return np.diff(self._ends, prepend=0)

    @cached_property
    def label_counts(self) -> npt.NDArray[np.int64]:
        """Number of tokens of each example that the loss is taken on."""
        counts = np.zeros(len(self), np.int64)
        for first, last in self._parts():
            ends = self._ends[first:last]
            begins = ends - self.lengths[first:last]
            labels = np.asarray(self._labels[begins[0] : ends[-1]])
            has_loss = labels != IGNORE_INDEX
            release_pages(labels)
            has_loss[(begins - begins[0])[ends > begins]] = False
            before = np.concatenate([[0], np.cumsum(has_loss)])
            counts[first:last] = before[ends - begins[0]] - before[begins - begins[0]]
        return counts

    @cached_property
    def groups(self) -> npt.NDArray[np.int64]:
        """Each example's group: windows of one document and the answers of a pair share one."""
        groups = np.cumsum(self._continues[:: self.unit] == 0, dtype=np.int64) - 1
        return np.repeat(groups, self.unit)

    @property
    def has_windows(self) -> bool:
        """Whether several rows share a group, as windows or as repetitions in a mixture."""
        return len(np.unique(self.groups)) < self.num_rows

    @property
    def num_label_tokens(self) -> int:
        """Number of tokens that the loss is taken on, in all examples."""
        return int(self.label_counts.sum())

    @property
    def num_rows(self) -> int:
        """Number of rows; a pair counts once."""
        return len(self) // self.unit

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all examples."""
        return len(self._ids)

    @property
    def longest(self) -> int:
        """Length of the longest example in tokens."""
        return int(self.lengths.max(initial=0))

    @cached_property
    def max_token_id(self) -> int:
        """Largest token id; -1 if there are no tokens."""
        return max((int(piece.max()) for piece in self._pieces(self._ids)), default=-1)

    def prompt_row(self, number: int) -> Any:
        """The ``PromptRow`` of an example; None unless the data set has prompts alone."""
        return None

    @cached_property
    def image_sources(self) -> Mapping[str, ImageSource]:
        """The images of the examples by their keys."""
        return {source.key: source for source in self._images.sources}

    @property
    def source_of(self) -> npt.NDArray[np.int32] | None:
        """The index of each example's data set in ``source_names``; None without a mixture."""
        return None

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all ids, labels, lengths, weights, images and targets."""
        digest = hashlib.sha256()
        for array in (self._ends, self._ids, self._labels):
            for piece in self._pieces(array):
                digest.update(np.ascontiguousarray(piece).data)
        if (self._weights != 1).any():
            digest.update(np.ascontiguousarray(self._weights).data)
        for key in chain.from_iterable(map(self._images.keys, range(len(self._images.ends)))):
            digest.update(key.encode())
        if self._targets is not None:
            digest.update(np.ascontiguousarray(self._targets).data)
        return digest.hexdigest()[:16]
