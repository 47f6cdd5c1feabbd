"""Which tokens stand for what is learnt."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

Span = tuple[int, int]

_NOWHERE = (1 << 62, 1 << 62)


def tokens_in_spans(offsets: Sequence[Span], spans: Sequence[Span]) -> npt.NDArray[np.bool_]:
    """Marks tokens that stand, at least in part, for characters in one of the spans.

    Args:
        offsets: For each token its character range; ``(0, 0)`` for added special tokens. Spaces
            that a tokenizer leaves out of its ranges belong to the token after them.
        spans: Ascending, disjoint character ranges.
    """
    flat = chain.from_iterable(offsets)  # as pairs, NumPy takes three times as long
    starts, ends = np.fromiter(flat, np.int64, 2 * len(offsets)).reshape(-1, 2).T
    firsts, lasts = np.array([*spans, _NOWHERE], np.int64).T
    covered = np.maximum.accumulate(np.append(0, ends))[:-1]
    begins = np.minimum(starts, covered)
    # The first span that ends behind where tokens have begun so far.
    nearest = np.searchsorted(lasts[:-1], np.maximum.accumulate(begins), "right")
    inside: npt.NDArray[np.bool_] = np.maximum(begins, firsts[nearest]) < np.minimum(
        ends, lasts[nearest]
    )
    return inside
