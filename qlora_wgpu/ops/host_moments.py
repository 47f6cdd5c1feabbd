"""AdamW's moments in host memory: parts of them pass through the device in each step's update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from qlora_wgpu.graph.parking import PLACES, Parked
from qlora_wgpu.graph.tensor import Storage, Tensor, vector

_PART = 1 << 21  # floats; a multiple of 64, so that windows may be bound


@dataclass(frozen=True)
class MomentsPart:
    """A part of both moments, and the buffers that it passes through.

    Attributes:
        begin: The first float of the adapter that it belongs to.
        first: m in host memory.
        second: v in host memory.
        first_moment: m on the device.
        second_moment: v on the device.
    """

    begin: int
    first: Parked
    second: Parked
    first_moment: Tensor
    second_moment: Tensor

    def window(self, whole: Tensor) -> Tensor:
        """The part of a flat vector that it belongs to."""
        count = self.first_moment.columns
        return replace(whole, columns=count, stride=count, offset=whole.offset + 4 * self.begin)


def moments_in_parts(moments: Sequence[npt.NDArray[np.float32]]) -> list[MomentsPart]:
    """Cuts both moments; what the parts write goes to the very arrays.

    Args:
        moments: m and v.
    """
    length = len(moments[0])
    size = min(_PART, length)
    buffers = [
        [Storage("moments on their way", "staging", 4 * size) for _ in moments]
        for _ in range(PLACES)
    ]
    parts = []
    for turn, begin in enumerate(range(0, length, size)):
        count = min(size, length - begin)
        m, v = (
            Parked("moments", 4 * count, each[begin : begin + count].view(np.uint8), lasts=True)
            for each in moments
        )
        on_m, on_v = (vector("moments", count, "float32", each) for each in buffers[turn % PLACES])
        parts.append(MomentsPart(begin, m, v, on_m, on_v))
    return parts


def passing_bytes(length: int) -> int:
    """Bytes of the buffers that moments of so many floats pass through."""
    size = min(_PART, length)
    return 2 * min(PLACES, -(-length // size)) * 4 * size
