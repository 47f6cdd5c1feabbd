"""Random choices that stay the same on every Python version.

Python promises a stable sequence for one seed only for ``Random.random()``; ``choice``, ``sample``
and ``shuffle`` may change. Everything the demo draws goes through this class, so the committed
data can be made again, byte for byte, years later.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


class Dice:
    """A seeded source of choices, built on ``random.Random(seed).random()`` alone."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def below(self, n: int) -> int:
        """Returns a whole number in [0, n)."""
        return int(self._random.random() * n)

    def between(self, low: int, high: int) -> int:
        """Returns a whole number in [low, high], both ends included."""
        return low + self.below(high - low + 1)

    def chance(self, probability: float) -> bool:
        """Returns True with the given probability."""
        return self._random.random() < probability

    def pick(self, items: Sequence[Item]) -> Item:
        """Returns one of the items."""
        return items[self.below(len(items))]

    def sample(self, items: Sequence[Item], n: int) -> list[Item]:
        """Returns n different items, in random order."""
        return self.shuffled(items)[:n]

    def shuffled(self, items: Sequence[Item]) -> list[Item]:
        """Returns the items in random order (Fisher-Yates)."""
        order = list(items)
        for last in range(len(order) - 1, 0, -1):
            other = self.below(last + 1)
            order[last], order[other] = order[other], order[last]
        return order
