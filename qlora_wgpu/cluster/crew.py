"""All workers of a division: who may have blocks, and what is expected of each."""

from __future__ import annotations

from qlora_wgpu.cluster.orders import in_order
from qlora_wgpu.cluster.records import Held, Record

_LATE = 2.0  # times what is expected, after which somebody else computes a block, too
_LEAST = 2.0  # seconds that a block may always take
_FIRST = 20.0  # more for what a worker has not done before: it compiles
_UNKNOWN = 60.0  # for the first block of all
_FORGIVEN = 0.1  # of the difference to the others, for each step in which a worker did nothing


class Crew:
    """The workers that there are.

    Attributes:
        records: By a worker's name.
    """

    def __init__(self) -> None:
        """Knows nobody."""
        self.records: dict[str, Record] = {}

    @property
    def suspects(self) -> list[str]:
        """Workers that have not answered for too long."""
        return sorted(record.name for record in self.records.values() if record.is_suspect)

    @property
    def usable(self) -> list[str]:
        """Workers that may have blocks, in the order of their names."""
        names = (record.name for record in self.records.values() if not record.is_suspect)
        return sorted(names, key=in_order)

    def pace(self, record: Record, kind: str) -> float:
        """Seconds a token that a worker is expected to take.

        That is what was measured; of one that has compiled for all that it did, what the others
        take, and no more than it took then. Where all have, the fewest that one took.
        """
        own, all_speeds = record.speeds[kind], [r.speeds[kind] for r in self.records.values()]
        if own.pace is not None:
            return own.pace
        known = [speed.pace for speed in all_speeds if speed.pace is not None]
        if known:
            mean = sum(known) / len(known)
            return mean if own.first is None else min(own.first, mean)
        return min((speed.first for speed in all_speeds if speed.first is not None), default=1.0)

    def end(self, record: Record, now: float) -> float:
        """When a worker is expected to be done with what it has."""
        end = now
        for index, held in enumerate(record.held.values()):
            needed = held.size * self.pace(record, held.kind)
            end = end + needed if index else max(now, self._start(record, held) + needed)
        return end

    def _start(self, record: Record, held: Held) -> float:
        """When a worker has, or should have, begun its first block."""
        begun = held.sent + (record.writing or 0.0) if held.begun is None else held.begun
        return max(begun, record.last_done)

    def due(self, record: Record, *, compiles: bool = True) -> float:
        """When the first block that a worker has is too late.

        Args:
            record: The worker.
            compiles: Whether what is new to it may take longer.
        """
        held = next(iter(record.held.values()), None)
        if held is None:
            return float("inf")
        start = max(held.sent if held.begun is None else held.begun, record.last_done)
        writing = (record.writing or 0.0) if held.begun is None else 0.0
        if all(r.speeds[held.kind].first is None for r in self.records.values()):
            return start + _UNKNOWN
        is_new = held.size not in record.speeds[held.kind].known
        is_new |= held.begun is None and record.writing is None
        expected = writing + held.size * self.pace(record, held.kind)
        grace = _FIRST if is_new and compiles else 0.0
        return start + max(_LEAST, _LATE * expected) + grace

    def forgive(self, kind: str) -> None:
        """One that was too slow to get any work is tried again in the end: it may be free now.

        Args:
            kind: Of the blocks of the step that is over.
        """
        paces = [r.speeds[kind].pace for r in self.records.values()]
        fastest = min((pace for pace in paces if pace is not None), default=0.0)
        for record in self.records.values():
            speed = record.speeds[kind]
            if record.was_idle and speed.pace is not None:
                speed.pace += _FORGIVEN * (fastest - speed.pace)
            record.was_idle = not record.held
