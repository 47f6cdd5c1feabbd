"""Moments in host memory: parts of them pass through the device in each step's update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.graph.parking import PLACES, Parked
from qlora_wgpu.graph.pieces import Pieces, in_pieces
from qlora_wgpu.graph.tensor import Storage, Tensor, vector
from qlora_wgpu.ops.moments_8bit import BlockTable

_PART = 1 << 21  # words; a multiple of 64, so that windows may be bound


@dataclass(frozen=True)
class MomentsPart:
    """A part of all moments, and the buffers that it passes through.

    Attributes:
        piece: The number of the piece that it is of.
        begin: Its first word within a moment: in float32, the first float of the adapter that it
            belongs to.
        block: In 8 bits, its first block.
        end: In 8 bits, the block behind its last.
        kept: Each moment's in host memory.
        moments: Each moment's on the device.
    """

    piece: int
    begin: int
    block: int
    end: int
    kept: tuple[Parked, ...]
    moments: tuple[Tensor, ...]


def moments_in_parts(
    moments: Sequence[Sequence[npt.NDArray[Any]]], blocks: BlockTable | None = None
) -> list[MomentsPart]:
    """Cuts the moments; what the parts write goes to the very arrays.

    Args:
        moments: The pieces of each, in words of four bytes.
        blocks: Between which blocks they may be cut, in 8 bits.
    """
    lengths, dtype = [len(piece) for piece in moments[0]], str(moments[0][0].dtype)
    size = _part(lengths)
    buffers = [
        [Storage("moments on their way", "staging", 4 * size) for _ in moments]
        for _ in range(PLACES)
    ]
    parts: list[MomentsPart] = []
    for piece, cuts in enumerate(_cuts(lengths, size, blocks)):
        _, first = cuts[0]
        for (block, begin), (end, after) in pairwise(cuts):
            window, count = slice(begin - first, after - first), after - begin
            kept = tuple(
                Parked("moments", 4 * count, each[piece][window].view(np.uint8), lasts=True)
                for each in moments
            )
            turn = buffers[len(parts) % PLACES]
            on_device = tuple(vector("moments", count, dtype, each) for each in turn)
            parts.append(MomentsPart(piece, begin, block, end, kept, on_device))
    return parts


def updated_parts(
    vectors: Sequence[Tensor | Pieces],
    moments: Sequence[Tensor | Pieces],
    passing: Sequence[MomentsPart],
) -> Iterator[tuple[int, tuple[Tensor, ...], MomentsPart | None]]:
    """What one launch after another updates, where moments lie element by element.

    Args:
        vectors: Parameters and gradient.
        moments: The moments, in the same pieces.
        passing: Their parts, where they are in host memory.

    Yields:
        The first element; the windows of the vectors and of the moments; the part that passes.
    """
    there = [in_pieces(each) for each in vectors]
    if not passing:
        all_pieces = [each.pieces for each in (*there, *map(in_pieces, moments))]
        for (begin, _), tensors in zip(
            there[0].numbered(), zip(*all_pieces, strict=True), strict=True
        ):
            yield begin, tensors, None
    for part in passing:
        count = part.moments[0].columns
        windows = tuple(each.part(part.begin, count) for each in there)
        yield part.begin, (*windows, *part.moments), part


def _cuts(
    lengths: Sequence[int], size: int, blocks: BlockTable | None
) -> Iterator[list[tuple[int, int]]]:
    """Yields each piece's parts: their first blocks and words, and the piece's end."""
    if blocks is not None:
        yield from (blocks.cuts(piece, size) for piece in blocks.pieces)
        return
    for first, end in pairwise(accumulate(lengths, initial=0)):
        yield [*((0, begin) for begin in range(first, end, size)), (0, end)]


def _part(lengths: Sequence[int]) -> int:
    """Words of the largest part."""
    return min(_PART, max(lengths))


def passing_parts(lengths: Sequence[int], blocks: BlockTable | None = None) -> int:
    """Number of parts that moments in pieces of so many words pass through the device in."""
    return sum(len(cuts) - 1 for cuts in _cuts(lengths, _part(lengths), blocks))


def transfer_bytes(lengths: Sequence[int], moments: int = 2) -> int:
    """Bytes of host memory that so many moments, in such pieces, pass through on their way."""
    return 2 * passing_bytes(
        lengths, moments
    )  # two copies of each buffer are on their way to the host


def passing_bytes(lengths: Sequence[int], moments: int = 2) -> int:
    """Bytes of the buffers that so many moments, in pieces of so many words, pass through."""
    size = _part(lengths)
    parts = sum(-(-length // size) for length in lengths)
    return moments * min(PLACES, parts) * 4 * size
