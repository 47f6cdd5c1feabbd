"""Workers that have not answered for too long are asked whether they do again."""

from __future__ import annotations

import asyncio

from qlora_wgpu.cluster.division import Division
from qlora_wgpu.cluster.member import Member
from qlora_wgpu.cluster.members import Members
from qlora_wgpu.cluster.progress import Progress

_PAUSE = 2.0  # seconds between two questions


class Suspects:
    """Asks them, each by itself, while others work."""

    def __init__(self, members: Members, division: Division, progress: Progress) -> None:
        """Asks nobody yet."""
        self._members = members
        self._division = division
        self._progress = progress

    def probe(self) -> None:
        """Begins to ask those who are not being asked."""
        suspects = set(self._division.suspects)
        for member in self._members.ready:
            if member.name in suspects and not member.is_probed:
                member.is_probed = True
                self._progress.spawn(self._probe(member))

    async def _probe(self, member: Member) -> None:
        try:
            await asyncio.sleep(_PAUSE)
            await self._members.call(member, "identity")
            self._division.answered(member.name)
            self._progress.notify()
        except Exception:  # it is asked again
            pass
        finally:
            member.is_probed = False
