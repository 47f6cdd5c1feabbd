"""Order of examples and padded batches, both functions of their arguments alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qlora_wgpu.data.dataset import Example
from qlora_wgpu.data.formats import IGNORE_INDEX
from qlora_wgpu.errors import ShapeError

SMALLEST_BUCKET = 32


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Padded examples; every array is int32 of shape (batch, length).

    Attributes:
        input_ids: Token ids, padded on the right.
        labels: Ids where the model learns, -100 elsewhere and in the padding; not shifted.
        attention_mask: 1 for tokens, 0 for padding.
    """

    input_ids: npt.NDArray[np.int32]
    labels: npt.NDArray[np.int32]
    attention_mask: npt.NDArray[np.int32]


def epoch_order(n: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The order in which an epoch visits ``n`` examples.

    Philox is counter-based: the order follows from (seed, epoch) alone, so a resumed run needs no
    replay. Its raw bits are sorted here, because only they are the same in all versions of NumPy.

    Returns:
        A permutation of ``range(n)``, int64.
    """
    if n < 0 or seed < 0 or epoch < 0:
        raise ShapeError(f"n, seed and epoch must not be negative, got {n}, {seed} and {epoch}")
    bits = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(n)
    return np.argsort(bits, kind="stable").astype(np.int64)


def collate(examples: Sequence[Example], pad_token_id: int, length: int) -> Batch:
    """Pads examples on the right into one batch.

    Args:
        examples: One per row.
        pad_token_id: Id in the padding. It is masked, but must lie within the vocabulary.
        length: Number of columns, at least that of the longest example.

    Raises:
        ShapeError: If there is no example, or one is longer than ``length``.
    """
    if not examples:
        raise ShapeError("a batch needs at least one example")
    longest = max(map(len, examples))
    if longest > length:
        raise ShapeError(f"an example of {longest} tokens does not fit a batch of length {length}")
    shape = (len(examples), length)
    input_ids = np.full(shape, pad_token_id, dtype=np.int32)
    labels = np.full(shape, IGNORE_INDEX, dtype=np.int32)
    attention_mask = np.zeros(shape, dtype=np.int32)
    for row, example in enumerate(examples):
        input_ids[row, : len(example)] = example.input_ids
        labels[row, : len(example)] = example.labels
        attention_mask[row, : len(example)] = 1
    return Batch(input_ids, labels, attention_mask)


def bucket_length(longest: int, max_seq_length: int) -> int:
    """The padded length for a batch: 32, 48, 64, 96, 128, ... up to ``max_seq_length``.

    Few lengths mean few traced graphs; a step of at most 1.5 bounds the padding to a third.

    Raises:
        ShapeError: If ``longest`` exceeds ``max_seq_length``.
    """
    if longest > max_seq_length:
        raise ShapeError(f"{longest} tokens exceed max_seq_length={max_seq_length}")
    bucket = SMALLEST_BUCKET
    while bucket < longest:
        half_more = bucket + bucket // 2
        bucket = half_more if half_more >= longest else 2 * bucket
    return min(bucket, max_seq_length)
