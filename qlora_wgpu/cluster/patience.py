"""How long an engine waits for workers, and what it says meanwhile."""

from __future__ import annotations

from collections.abc import Callable

from qlora_wgpu.cluster.members import Members
from qlora_wgpu.cluster.progress import Progress
from qlora_wgpu.errors import ClusterError

_SOON = 3.0  # seconds after which it is told that somebody is missing
_OPENING = 1800.0  # seconds that a worker may take to open the model, however short the patience


class Patience:
    """Ends what has had no progress for too long."""

    def __init__(
        self, seconds: float, progress: Progress, members: Members, tell: Callable[[str], None]
    ) -> None:
        """Has told nothing yet.

        Args:
            seconds: Without progress, after which it ends.
            progress: When there was some.
            members: The workers.
            tell: Told that workers are missing.
        """
        self._seconds = seconds
        self._progress = progress
        self._members = members
        self._tell = tell
        self._told = ""

    def check(self, what: str, *, count: int = 1) -> None:
        """Tells who is missing, and ends what has had no progress for too long.

        Args:
            what: What there is, or is not, so far.
            count: How many workers are needed.

        Raises:
            ClusterError: If there was no progress for too long.
        """
        waited, members = self._progress.waited, self._members
        missing = ""
        if members.is_nobody_there:
            missing = "no worker is there: waiting for one"
        elif len(members.ready) < count and not members.opening:
            missing = f"{len(members.ready)} of {count} workers are there: waiting for more"
        if missing and missing != self._told and waited > _SOON:
            self._told = missing
            limit = f"for {self._seconds:g} seconds at most (cluster.patience)"
            self._tell(f"{missing} {limit}")
        if members.ready and not missing:
            self._told = ""  # it is told again the next time
        if waited > (max(self._seconds, _OPENING) if members.opening else self._seconds):
            reason = f"; {members.last_reason}" if members.last_reason else ""
            if names := ", ".join(member.name for member in members.opening):
                reason += f"; the model is still being opened by {names}"
            raise ClusterError(f"{what} for {waited:.0f} seconds (cluster.patience){reason}")
