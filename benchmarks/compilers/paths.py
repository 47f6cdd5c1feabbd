"""Which way the usual turn of a loop takes through its branches.

A turn makes as many products as it can, loads the next turn's factors and takes exponents of scores
where it can, and otherwise passes over what it can: what has barriers of its own, such as rescaling
sums, then masks, and what converts numbers beyond f16's end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Instruction:
    """What a way through a loop goes by.

    Attributes:
        products: That it makes.
        wanted: Whether it is of a turn, even where a branch passes over it.
        barriers: 1 if it is one.
    """

    products: int = 0
    wanted: bool = False
    barriers: int = 0


@dataclass(frozen=True)
class _Way:
    products: int
    barriers: int
    wanted: int
    length: int
    first: int
    rest: _Way | None

    @property
    def order(self) -> tuple[int, int, int, int]:
        """The least is the usual one."""
        return -self.products, self.barriers, -self.wanted, self.length

    def behind(self, own: Instruction, at: int) -> _Way:
        """This way after an instruction before it."""
        return _Way(
            self.products + own.products, self.barriers + own.barriers,
            self.wanted + own.wanted, self.length + 1, at, self,
        )  # fmt: skip

    def places(self) -> list[int]:
        found: list[int] = []
        way = self
        while way.rest is not None:
            found.append(way.first)
            way = way.rest
        return found


def usual_way(loop: Sequence[Instruction], nexts: Callable[[int], Sequence[int]]) -> list[int]:
    """The instructions of the usual turn.

    Args:
        loop: The instructions, of which the last leads back to the first.
        nexts: Where each may lead to, behind itself; ways end at the last one.
    """
    last = len(loop) - 1
    end = _Way(0, 0, 0, 0, last, None)
    ways: list[_Way | None] = [None] * last + [end.behind(loop[last], last)]
    for at in range(last - 1, -1, -1):
        known = (ways[to] for to in nexts(at) if at < to <= last)
        found = [way.behind(loop[at], at) for way in known if way is not None]
        ways[at] = min(found, key=lambda way: way.order, default=None)
    return ways[0].places() if ways[0] is not None else []
