"""The memory of a device that a page takes, to the byte."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

from qlora_wgpu.gpu.limits import ALIGNMENT, buffer_bytes


class Needs:
    """What plans need that run one at a time.

    Attributes:
        slots: The sizes of slots that serve all of them, the largest first.
    """

    def __init__(self) -> None:
        """Nothing yet."""
        self.slots: list[int] = []
        self._buffers: set[int] = set()
        self._parameters = 0

    def add(self, plan: dict[str, Any]) -> None:
        """Adds a plan, as ``plan_json`` writes it."""
        sizes = sorted(plan["slots"], reverse=True)
        self.slots = [max(pair) for pair in zip_longest(self.slots, sizes, fillvalue=0)]
        launches = plan["launches"]
        self._buffers |= {w[1] for launch in launches for w in launch[2] if w[1] >= 0}
        # A page makes one buffer for the parameters of a plan, even where there are none.
        self._parameters += ALIGNMENT * max(sum(bool(launch[3]) for launch in launches), 1)

    def nbytes(self, sizes: Sequence[int], also: Iterable[int]) -> int:
        """Bytes of everything.

        Args:
            sizes: Bytes of all buffers, by their numbers.
            also: Numbers of buffers that are needed beside those of the plans.
        """
        buffers = self._buffers.union(also)
        pooled = sum(map(buffer_bytes, self.slots))
        return sum(sizes[number] for number in buffers) + pooled + self._parameters
