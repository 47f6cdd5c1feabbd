"""Ranges of characters, and which tokens stand for what is in them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

Span = tuple[int, int]

_NOWHERE = (1 << 62, 1 << 62)


def joined(spans: Sequence[Span]) -> list[Span]:
    """Spans in any order as ascending, disjoint ones."""
    whole: list[Span] = []
    for start, end in sorted(spans):
        if whole and start < whole[-1][1]:
            whole[-1] = whole[-1][0], max(end, whole[-1][1])
        else:
            whole.append((start, end))
    return whole


def without(spans: Sequence[Span], holes: Sequence[Span]) -> list[Span]:
    """What is left of ascending, disjoint spans without what is in the holes."""
    left: list[Span] = list(spans)
    for start, end in holes:
        pieces = ((a, min(b, start)) for a, b in left), ((max(a, end), b) for a, b in left)
        left = sorted((a, b) for each in pieces for a, b in each if a < b)
    return left


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
