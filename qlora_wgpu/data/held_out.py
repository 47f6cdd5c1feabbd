"""Rows that are held out of a data set, and rows that two data sets have in common."""

from __future__ import annotations

import hashlib
from collections import Counter
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.data.examples import Counts, Dataset, Example
from qlora_wgpu.errors import DataError


class DatasetPart(Dataset):
    """Some of a data set's examples, which stay where they are."""

    def __init__(
        self, whole: Dataset, numbers: npt.NDArray[np.int64], counts: Counts | None = None
    ) -> None:
        """Chooses examples.

        Args:
            whole: The data set.
            numbers: Those of its examples that are chosen, rising.
            counts: Counts of what became of the source's rows; by default each example is a row.
        """
        super().__init__((), counts or Counts(rows=len(numbers)))
        self._whole = whole
        self._numbers = numbers
        self.source_names, self.source_sizes = whole.source_names, whole.source_sizes
        self.unit = whole.unit

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def num_others(self) -> int:
        """Number of the whole's examples that are in the other part."""
        return len(self._whole) - len(self)

    def _at(self, number: int) -> Example:
        return self._whole[int(self._numbers[number])]

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each example."""
        return self._whole.lengths[self._numbers]

    @cached_property
    def label_counts(self) -> npt.NDArray[np.int64]:
        """Positions of each example that the loss is taken over."""
        return self._whole.label_counts[self._numbers]

    @cached_property
    def text_numbers(self) -> npt.NDArray[np.int64]:
        """The number of each example's row: windows of one text have the same, and so do pairs."""
        return self._whole.text_numbers[self._numbers]

    @property
    def num_tokens(self) -> int:
        """Tokens of all examples together."""
        return int(self.lengths.sum())

    @property
    def source_of(self) -> npt.NDArray[np.int32] | None:
        """The number of each example's data set, in ``source_names``; None without a mixture."""
        sources = self._whole.source_of
        return None if sources is None else sources[self._numbers]

    @cached_property
    def max_token_id(self) -> int:
        """Largest token id; -1 if there is none."""
        return max((int(example.input_ids.max(initial=-1)) for example in self), default=-1)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the whole's content and of which examples these are."""
        digest = hashlib.sha256(self._whole.fingerprint.encode())
        digest.update(self._numbers.astype("<i8").tobytes())
        return digest.hexdigest()[:16]


def split_off(dataset: Dataset, size: float, seed: int) -> tuple[Dataset, Dataset]:
    """Parts a data set in two, by the contents of its examples and a seed alone.

    The same rows are held out whatever their order and the machine. Rows that are equal stay
    together, and so do the windows of a text, so that no row is learnt and measured.

    Args:
        dataset: The examples.
        size: How many rows are held out, or which share of them where it is below 1.
        seed: Another one holds out others.

    Returns:
        What is left, and what is held out: at least ``size``.

    Raises:
        DataError: If nothing would be left to learn from.
    """
    texts, row_of = np.unique(dataset.text_numbers, return_inverse=True)
    rows = len(texts)
    count = max(1, round(size * rows)) if size < 1 else int(size)
    if count >= rows:
        together = "" if rows == dataset.num_rows else " (of texts, windows stay together)"
        raise DataError(
            f"data.eval_split holds {count:,} rows out, but there are {rows:,} in all{together}: "
            "nothing would be left to learn from"
        )
    digests = _digests(dataset, row_of, rows, seed)
    is_held = digests <= np.sort(digests)[count - 1]
    if is_held.all():
        raise DataError(
            "data.eval_split leaves nothing to learn from: the rows are all the same, and equal "
            "rows are held out together"
        )
    of_example = is_held[row_of]
    held_out = DatasetPart(dataset, np.flatnonzero(of_example), Counts(rows=int(is_held.sum())))
    return DatasetPart(dataset, np.flatnonzero(~of_example), dataset.counts), held_out


def rows_in_both(train: Dataset, held_out: Dataset) -> int:
    """Number of held-out rows that are learnt from, too: those with the same tokens.

    Of texts that are cut into windows each window is a row. What is held out is in memory, as a
    number for each row; what is learnt passes by.
    """
    lengths = _row_lengths(train)
    rows = range(held_out.num_rows)
    measured = Counter(content_digest(_row_ids(held_out, number)) for number in rows)
    shared = 0
    for number in np.flatnonzero(np.isin(lengths, np.unique(_row_lengths(held_out)))):
        shared += measured.pop(content_digest(_row_ids(train, int(number))), 0)
    return shared


def _digests(
    dataset: Dataset, row_of: npt.NDArray[np.int64], rows: int, seed: int
) -> npt.NDArray[np.uint64]:
    """A number for each row, of the contents of all examples that it has become.

    What a mixture repeats counts once, so that the row has the number that it has alone.
    """
    order = np.argsort(row_of, kind="stable")
    ends = np.cumsum(np.bincount(row_of, minlength=rows))
    begins = np.concatenate([[0], ends[:-1]])

    def ids(row: int) -> npt.NDArray[np.int32]:
        examples = (dataset[int(n)].input_ids for n in order[begins[row] : ends[row]])
        parts = list({part.tobytes(): part for part in examples}.values())
        if len(parts) == 1 == dataset.unit:
            return parts[0]
        return np.concatenate([array for part in parts for array in (part, [-1])])

    digests = (content_digest(ids(row), seed) for row in range(rows))
    return np.fromiter(digests, np.uint64, rows)


def _row_lengths(dataset: Dataset) -> npt.NDArray[np.int64]:
    lengths: npt.NDArray[np.int64] = dataset.lengths.reshape(-1, dataset.unit).sum(axis=1)
    return lengths


def _row_ids(dataset: Dataset, number: int) -> npt.NDArray[np.int32]:
    """The tokens of all examples that make a row."""
    first = number * dataset.unit
    if dataset.unit == 1:
        return dataset[first].input_ids
    parts = dataset[first : first + dataset.unit]
    return np.concatenate([part for example in parts for part in (example.input_ids, [-1])])


def content_digest(ids: npt.NDArray[Any] | list[int], seed: int = 0) -> int:
    """A number of 64 bits for a sequence of tokens, the same on every machine."""
    data = np.asarray(ids, "<i4").tobytes()
    key = seed.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, key=key).digest(), "little")
