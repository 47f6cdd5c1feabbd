"""Which tensors may be dropped when launches are joined."""

from dataclasses import dataclass, field

import pytest

from qlora_wgpu.graph.rewrite import Uses
from qlora_wgpu.graph.tensor import Storage, matrix


@dataclass(frozen=True)
class Launch:
    tensors: dict = field(default_factory=dict)


A, B, OUT = (matrix(name, 2, 8, "float32") for name in ("a", "b", "out"))
STORED = matrix("stored", 2, 8, "float32", Storage("s", "base", 64))
LAUNCHES = [Launch({"x": STORED, "y": A}), Launch({"x": A, "y": B}), Launch({"x": B, "y": OUT})]


@pytest.fixture
def uses():
    return Uses(LAUNCHES, [OUT])


def test_intermediates_are_written_once_and_read_once(uses):
    assert uses.single(A) and uses.single(A, B) and uses.single(OUT)  # which is read afterwards
    assert not uses.single(STORED) and not uses.single(A, STORED)
    assert not Uses(LAUNCHES[:2], []).single(B)
    assert not Uses([*LAUNCHES, LAUNCHES[1]], []).single(A)


def test_later_launches_have_what_replaces_a_tensor(uses):
    assert uses.renamed(LAUNCHES[1]) is LAUNCHES[1]
    assert uses.replace(A, STORED)
    assert uses.renamed(LAUNCHES[1]).tensors == {"x": STORED, "y": B}
    assert uses.renamed(LAUNCHES[2]) is LAUNCHES[2]


def test_outputs_and_what_is_stored_are_not_replaced(uses):
    for tensor in (OUT, STORED):
        assert not uses.replace(tensor, B)
        assert uses.replace(tensor, tensor)
    assert all(uses.renamed(launch) is launch for launch in LAUNCHES)
