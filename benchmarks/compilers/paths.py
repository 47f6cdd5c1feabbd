"""Which way the usual turn of a loop takes through its branches.

A turn makes as many products as it can, loads the next turn's factors and takes exponents of scores
where it can, and otherwise passes over what it can: what has barriers of its own, such as rescaling
sums, then masks, and what converts numbers beyond f16's end. A kernel that walks twice, with fewer
products the first time, has a turn of each kind.
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
    barriers: int
    wanted: int
    length: int
    first: int
    rest: _Way | None

    @property
    def order(self) -> tuple[int, int, int]:
        """The least is the usual one."""
        return self.barriers, -self.wanted, self.length

    def places(self) -> list[int]:
        found: list[int] = []
        way: _Way | None = self
        while way is not None:
            found.append(way.first)
            way = way.rest
        return found


def usual_ways(
    loop: Sequence[Instruction], nexts: Callable[[int], Sequence[int]]
) -> dict[int, list[int]]:
    """The instructions of a turn, by how many products it makes.

    Args:
        loop: The instructions, of which the last leads back to the first.
        nexts: Where each may lead to, behind itself; ways end at the last one.
    """
    last = len(loop) - 1
    ways: list[dict[int, _Way]] = [{} for _ in loop]
    for at in range(last, -1, -1):
        own = loop[at]
        behind = [ways[to] for to in nexts(at) if at < to <= last]
        if at == last:
            ways[at][own.products] = _Way(own.barriers, int(own.wanted), 1, at, None)
        for found in behind:
            for products, way in found.items():
                barriers, wanted = way.barriers + own.barriers, way.wanted + own.wanted
                new = _Way(barriers, wanted, way.length + 1, at, way)
                known = ways[at].get(products + own.products)
                if known is None or new.order < known.order:
                    ways[at][products + own.products] = new
    return {products: way.places() for products, way in ways[0].items()}
