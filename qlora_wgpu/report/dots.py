"""Curves as text: in each character two columns of four dots (Braille), for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from qlora_wgpu.report.axes import Axis
from qlora_wgpu.report.curves import Points

MARK = "●"
_BLANK = 0x2800
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # by column, from the top


def dots(
    curve: Points, marks: Points, width: int, height: int, *, may_be_log: bool = True
) -> tuple[list[str], Axis] | None:
    """A drawing of a curve, and of single points over the same steps.

    Args:
        curve: (step, value), steps rising; neighbours are joined.
        marks: (step, value) of what is drawn as a mark of its own.
        width: Characters of a row.
        height: Rows.
        may_be_log: Whether values that span several sizes get a logarithmic axis.

    Returns:
        The rows, from the top, and the axis of the values; None where there is no point.
    """
    points = [*curve, *marks]
    if not points:
        return None
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    up = Axis.of_values([y for _, y in points], may_be_log=may_be_log)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (2 * width - 1) * (x - first) / max(last - first, 1)
        return across, (4 * height - 1) * (1 - up.share(y))

    cells = [[0] * width for _ in range(height)]
    for column, row in _joined([place(x, y) for x, y in curve]):
        cells[row // 4][column // 2] |= _DOTS[column % 2][row % 4]
    rows = [[chr(_BLANK + bits) for bits in row] for row in cells]
    for x, y in marks:
        across, down = place(x, y)
        rows[round(down) // 4][round(across) // 2] = MARK
    return ["".join(row) for row in rows], up


def _joined(places: Sequence[tuple[float, float]]) -> Iterator[tuple[int, int]]:
    """All dots from one place to the next, along straight lines."""
    for x, y in places[:1]:
        yield round(x), round(y)
    for (x0, y0), (x1, y1) in pairwise(places):
        count = max(1, round(max(abs(x1 - x0), abs(y1 - y0))))
        for i in range(1, count + 1):
            yield round(x0 + (x1 - x0) * i / count), round(y0 + (y1 - y0) * i / count)
