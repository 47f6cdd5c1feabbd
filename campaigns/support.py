"""What every campaign has: its arguments, its clock and its table of outcomes."""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable


def peak_bytes() -> int:
    """The most memory that this process has had, whatever it did before."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Tally:
    """Outcomes of a campaign; those that must not be are kept with how to repeat them."""

    def __init__(self, seconds: float, first: int = 0) -> None:
        self.first = first  # of its trials, so that one can be repeated by itself
        self.outcomes: Counter[str] = Counter()
        self.failures: list[str] = []
        self._end = time.monotonic() + seconds
        self._begin = time.monotonic()

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._end

    def add(self, outcome: str) -> None:
        self.outcomes[outcome] += 1

    def fail(self, what: str, how: str) -> None:
        self.outcomes[f"WRONG: {what}"] += 1
        self.failures.append(f"{what}: {how}")
        print(f"{what}: {how}", file=sys.stderr, flush=True)

    def show(self, title: str) -> None:
        print(f"{title}, {time.monotonic() - self._begin:,.0f} s")
        for outcome, count in sorted(self.outcomes.items()):
            print(f"  {count:8,}  {outcome}")


def campaign(title: str, body: Callable[[int, int, Tally], None], count: int) -> None:
    """Parses ``--count``, ``--seed`` and ``--seconds``, runs, and exits with 1 on a failure."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--first", type=int, default=0, help="the number of its first trial")
    options = parser.parse_args()
    tally = Tally(options.seconds, options.first)
    body(options.count, options.seed, tally)
    tally.show(f"{title}, seed {options.seed}")
    sys.exit(1 if tally.failures else 0)
