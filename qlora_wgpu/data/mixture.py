"""A mixture of several data sets: how many rows each contributes to an epoch, and which."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from qlora_wgpu.data.batches import epoch_order
from qlora_wgpu.data.dataset import Subset
from qlora_wgpu.data.examples import Counts, Dataset, Example
from qlora_wgpu.errors import DataError
from qlora_wgpu.images.sources import ImageSource
from qlora_wgpu.limits import MIXED_ROWS

StoppingStrategy = Literal["first_exhausted", "all_exhausted"]
_CHOICES = 2**40  # seeds' numbers for choosing rows are beyond those of epochs


@dataclass(frozen=True)
class MixtureSource:
    """What one data set contributes to a mixture."""

    weight: float | None = None  # relative to the other sources' weights; None without weights
    rows: float | None = None  # a number of rows, or a share below 1; None for all


class ConcatDataset(Dataset):
    """A view of several data sets, one after the other."""

    def __init__(self, parts: Sequence[Dataset], names: Sequence[str]) -> None:
        total: Counter[str] = Counter()
        for part in parts:
            total.update(asdict(part.counts))
        super().__init__((), Counts(**total))
        self._sets = tuple(parts)
        self._firsts = np.cumsum([0, *map(len, parts)]).tolist()
        self.source_names = distinct(names)
        self.source_sizes = tuple(part.num_rows for part in parts)
        self.unit = parts[0].unit

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def _at(self, number: int) -> Example:
        at = bisect_right(self._firsts, number) - 1
        example: Example = self._sets[at][number - self._firsts[at]]
        return example

    def prompt_row(self, number: int) -> Any:
        """The ``PromptRow`` of an example; None unless the data sets have prompts alone."""
        at = bisect_right(self._firsts, number) - 1
        return self._sets[at].prompt_row(number - self._firsts[at])

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Number of tokens of each example."""
        return np.concatenate([part.lengths for part in self._sets])

    @cached_property
    def label_counts(self) -> npt.NDArray[np.int64]:
        """Number of tokens of each example that the loss is taken on."""
        return np.concatenate([part.label_counts for part in self._sets])

    @cached_property
    def groups(self) -> npt.NDArray[np.int64]:
        """Each example's group: windows of one document and the answers of a pair share one."""
        numbers, first = [], 0
        for part in self._sets:
            numbers.append(first + part.groups)
            first += len(part)
        return np.concatenate(numbers)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all examples."""
        return sum(part.num_tokens for part in self._sets)

    @cached_property
    def max_token_id(self) -> int:
        """Largest token id; -1 if there are no tokens."""
        return max(part.max_token_id for part in self._sets)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the parts' contents, in their order."""
        fingerprints = ",".join(part.fingerprint for part in self._sets)
        return hashlib.sha256(fingerprints.encode()).hexdigest()[:16]

    @cached_property
    def image_sources(self) -> Mapping[str, ImageSource]:
        """The images of the examples by their keys."""
        return {key: each for part in self._sets for key, each in part.image_sources.items()}

    @property
    def source_of(self) -> npt.NDArray[np.int32]:
        """The index of each example's data set in ``source_names``."""
        return np.repeat(np.arange(len(self._sets), dtype=np.int32), np.diff(self._firsts))


def interleave(
    parts: Sequence[Dataset],
    names: Sequence[str],
    portions: Sequence[MixtureSource],
    strategy: StoppingStrategy,
    seed: int,
) -> Dataset:
    """Mixes data sets by their contents and a seed; pairs of examples stay together.

    A source that contributes fewer rows than it has contributes the same ones in each epoch; one
    that contributes more repeats all rows equally often, and some of them one more time.
    """
    whole = ConcatDataset(parts, names)
    sizes = [part.num_rows for part in parts]
    counts = examples_of(sizes, portions, strategy)
    if sum(counts) > MIXED_ROWS:
        raise DataError(
            f"data.sources add up to {sum(counts):,} rows per epoch, more than {MIXED_ROWS:,}: "
            "set fewer rows, or weights that differ less"
        )
    if counts == sizes:
        return whole
    rows, first = [], 0
    for index, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        rows.append(first + _chosen(size, count, seed, index))
        first += size
    sides = np.arange(whole.unit)  # both answers of a pair
    numbers = (np.concatenate(rows)[:, None] * whole.unit + sides).ravel()
    return Subset(whole, numbers, whole.counts)


def examples_of(
    sizes: Sequence[int], portions: Sequence[MixtureSource], strategy: StoppingStrategy
) -> list[int]:
    """How many rows each data set contributes to an epoch, at least one."""
    if portions[0].weight is None:
        return [_rows(portion, size) for portion, size in zip(portions, sizes, strict=True)]
    weights = [portion.weight or 0.0 for portion in portions]
    passes = [size / weight for size, weight in zip(sizes, weights, strict=True)]
    scale = min(passes) if strategy == "first_exhausted" else max(passes)
    return [  # the source that ends the epoch contributes all of its rows, despite rounding
        size if each == scale else max(1, _rounded(scale * weight, strategy))
        for size, each, weight in zip(sizes, passes, weights, strict=True)
    ]


def distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Makes names unique: the second ``a`` becomes ``a (2)``."""
    seen: Counter[str] = Counter()
    result = []
    for name in names:
        seen[name] += 1
        result.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return tuple(result)


def _rows(portion: MixtureSource, size: int) -> int:
    if portion.rows is None:
        return size
    return max(1, round(portion.rows * size)) if portion.rows < 1 else int(portion.rows)


def _rounded(examples: float, strategy: StoppingStrategy) -> int:
    near = round(examples)  # up to floating-point error
    if abs(examples - near) <= 1e-9 * examples:
        return near
    return math.floor(examples) if strategy == "first_exhausted" else math.ceil(examples)


def _chosen(size: int, count: int, seed: int, index: int) -> npt.NDArray[np.int64]:
    """The rows that the source of an index contributes, ascending."""
    passes, rest = divmod(count, size)
    some = epoch_order(size, seed, _CHOICES + index)[:rest]
    return np.sort(np.concatenate([np.tile(np.arange(size, dtype=np.int64), passes), some]))
