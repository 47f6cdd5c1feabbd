"""The adapter's parameters, which go to each worker once."""

from __future__ import annotations

import numpy as np

from qlora_wgpu.cluster.blocks import FloatArray
from qlora_wgpu.cluster.member import Member
from qlora_wgpu.cluster.members import Members


class Parameters:
    """The present parameters, and their number."""

    def __init__(self, members: Members) -> None:
        """There are none yet."""
        self._members = members
        self._version = 0
        self._values: FloatArray | None = None

    def publish(self, values: FloatArray) -> None:
        """The parameters with which blocks are computed from now on."""
        known = self._values
        if known is not None and np.array_equal(known.view(np.uint32), values.view(np.uint32)):
            return
        self._version += 1
        self._values = values

    async def give(self, member: Member) -> int:
        """Makes sure that a worker has the present parameters; their number.

        Raises:
            As ``Member.call`` does.
        """
        async with member.writing:
            version, values = self._version, self._values
            if member.version != version:
                await self._members.call(member, "write", version, values)
                member.version = version
            return version
