"""Packing: several examples in one row of a batch."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt


def pack(lengths: npt.NDArray[np.int64], limit: int) -> list[tuple[int, ...]]:
    """Puts examples into as few rows of ``limit`` tokens as best-fit decreasing finds.

    Args:
        lengths: Tokens of each example, at most ``limit``.
        limit: Tokens of a row.

    Returns:
        The examples of each row, each once, rows and their examples in the order of the data set.
    """
    order = np.argsort(-lengths, kind="stable")
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # what is left of each row, ascending
    for index in order.tolist():
        length = int(lengths[index])
        at = bisect_left(room, (length, -1))
        if at == len(room):
            left, row = limit, len(rows)
            rows.append([])
        else:
            left, row = room.pop(at)
        rows[row].append(index)
        insort(room, (left - length, row))
    return sorted(tuple(sorted(row)) for row in rows)
