"""AdamW's moments in host memory: parts of them pass through the device in each step's update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.graph.parking import PLACES, Parked
from qlora_wgpu.graph.tensor import Storage, Tensor, vector
from qlora_wgpu.ops.moments_8bit import BlockTable
from qlora_wgpu.ops.tensor import part_of

_PART = 1 << 21  # words; a multiple of 64, so that windows may be bound


@dataclass(frozen=True)
class MomentsPart:
    """A part of both moments, and the buffers that it passes through.

    Attributes:
        begin: Its first word within a moment: in float32, the first float of the adapter that it
            belongs to.
        block: In 8 bits, its first block.
        first: m in host memory.
        second: v in host memory.
        first_moment: m on the device.
        second_moment: v on the device.
    """

    begin: int
    block: int
    first: Parked
    second: Parked
    first_moment: Tensor
    second_moment: Tensor

    def window(self, whole: Tensor) -> Tensor:
        """The part of a flat vector that it belongs to."""
        return part_of(whole, self.begin, self.first_moment.columns)


def moments_in_parts(
    moments: Sequence[npt.NDArray[Any]], blocks: BlockTable | None = None
) -> list[MomentsPart]:
    """Cuts both moments; what the parts write goes to the very arrays.

    Args:
        moments: m and v, in words of four bytes.
        blocks: Between which blocks they may be cut, in 8 bits.
    """
    length, dtype = len(moments[0]), str(moments[0].dtype)
    size = min(_PART, length)
    cuts = [(0, begin) for begin in range(0, length, size)] + [(0, length)]
    if blocks is not None:
        cuts = blocks.cuts(size)
    buffers = [
        [Storage("moments on their way", "staging", 4 * size) for _ in moments]
        for _ in range(PLACES)
    ]
    parts = []
    for turn, ((block, begin), (_, end)) in enumerate(pairwise(cuts)):
        count = end - begin
        m, v = (
            Parked("moments", 4 * count, each[begin : begin + count].view(np.uint8), lasts=True)
            for each in moments
        )
        on_m, on_v = (vector("moments", count, dtype, each) for each in buffers[turn % PLACES])
        parts.append(MomentsPart(begin, block, m, v, on_m, on_v))
    return parts


def transfer_bytes(length: int) -> int:
    """Bytes of host memory that moments of so many floats pass through on their way."""
    return 2 * passing_bytes(length)  # two copies of each buffer are on their way to the host


def passing_bytes(length: int) -> int:
    """Bytes of the buffers that moments of so many words pass through."""
    size = min(_PART, length)
    return 2 * min(PLACES, -(-length // size)) * 4 * size
