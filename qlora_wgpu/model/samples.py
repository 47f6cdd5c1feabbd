"""The samples of a micro-batch, as objectives over whole answers read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import ShapeError

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Samples:
    """What is known of a micro-batch's samples besides their tokens, in the order of their rows.

    Pairs are neighbours, chosen before rejected, and every sample has a label.

    Attributes:
        references: float32, the reference's summed log probability of each answer.
        numbers: float32, of each what its objective reads: with DPO 1 where the answer's first
            token is not predicted, since no prompt is before it; with ORPO what the losses of the
            chosen answer and its prompt are multiplied by, with KTO 1 where it is desirable.
        prompts: (batch, seq), the targets that are not the answer's but have a loss; None for none.
    """

    references: FloatArray
    numbers: FloatArray
    prompts: npt.NDArray[np.bool_] | None = None

    @classmethod
    def plain(cls, count: int) -> Samples:
        """Samples of which nothing is known."""
        return cls(np.zeros(count, np.float32), np.zeros(count, np.float32))


def encode_samples(
    samples: Samples, segments: IntArray, rows: npt.NDArray[np.integer[Any]]
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """What kernels read of samples.

    Args:
        samples: The samples.
        segments: (batch, seq), 0 for padding, else one more than where the token's sample begins.
        rows: The label rows, rising.

    Returns:
        For each label row twice its sample's number, one more where it is the prompt's; and the
        table (samples, 4) of ``SampleBuffers``.

    Raises:
        ShapeError: If there are not as many samples with a label as are told of.
    """
    seq = segments.shape[1]
    places = rows // seq * (seq + 1) + segments.reshape(-1)[rows]
    begins = np.flatnonzero(np.diff(places, prepend=-1))
    count = len(samples.references)
    if len(begins) != count or len(samples.numbers) != count:
        raise ShapeError(f"{len(begins)} samples have a label, but {count} are told of")
    numbers = np.repeat(np.arange(count), np.diff(begins, append=len(rows)))
    of_rows = 2 * numbers
    if samples.prompts is not None:
        of_rows += samples.prompts.reshape(-1)[rows]
    table = np.empty((count, 4), np.uint32)
    table[:, 0], table[:, 1] = begins, np.append(begins[1:], len(rows))
    table[:, 2] = samples.references.astype(np.float32).view(np.uint32)
    table[:, 3] = samples.numbers.astype(np.float32).view(np.uint32)
    return of_rows.astype(np.uint32), table
