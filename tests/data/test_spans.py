"""Spans of a text: merged where they meet within each other, and what is left beside holes."""

import pytest

from qlora_wgpu.data.masking import joined, without


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], []),
        ([(4, 6), (0, 2)], [(0, 2), (4, 6)]),
        ([(0, 2), (2, 4)], [(0, 2), (2, 4)]),  # next to each other
        ([(0, 9), (1, 3), (8, 12)], [(0, 12)]),
    ],
)
def test_spans_that_overlap_are_one(spans, expected):
    assert joined(spans) == expected


@pytest.mark.parametrize(
    ("spans", "holes", "expected"),
    [
        ([(0, 10)], [], [(0, 10)]),
        ([(0, 10)], [(2, 4), (8, 12)], [(0, 2), (4, 8)]),
        ([(0, 3), (5, 9)], [(2, 6)], [(0, 2), (6, 9)]),
        ([(3, 7)], [(0, 3), (7, 9)], [(3, 7)]),
        ([(0, 3), (5, 9)], [(5, 9), (0, 3)], []),
    ],
)
def test_holes_leave_what_lies_beside_them(spans, holes, expected):
    assert without(spans, holes) == expected
