"""The ways that a search weighs: what each is reckoned to cost, and to take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from qlora_wgpu.graph.section import PLACES
from qlora_wgpu.model.fit import Fit
from qlora_wgpu.model.layout import ModelLayout
from qlora_wgpu.model.options import StepOptions
from qlora_wgpu.model.residency import Residency

Beside = Callable[[ModelLayout, StepOptions], int]


@dataclass(frozen=True)
class Way:
    """A way that is considered, with what it is reckoned to cost and to take."""

    residency: Residency
    options: StepOptions
    seconds: float
    total: int


Count = Callable[[Way, list[int]], int]


def cost(way: Way) -> tuple[float, int]:
    """By which ways are compared."""
    return way.seconds, way.total


class More:
    """What a run takes beside its step: exactly where a way was planned, reckoned elsewhere."""

    def __init__(self, beside: Beside | None, plain: Fit) -> None:
        self._beside = beside
        self._taken: dict[int, tuple[Fit, int]] = {}
        self._noted: dict[tuple[Residency, StepOptions], int] = {}
        self._plain = self.taken(plain) - plain.total

    def taken(self, found: Fit) -> int:
        """Bytes of all of a run."""
        if id(found) not in self._taken:
            more = 0 if self._beside is None else self._beside(found.layout, found.options)
            self._taken[id(found)] = found, found.total + more
        return self._taken[id(found)][1]

    def note(self, way: Way, found: Fit) -> None:
        """Learns how far a way was reckoned wrong: the most of any of its kind."""
        before = self._noted.get(_kind(way))
        taken = self.taken(found) - way.total
        self._noted[_kind(way)] = taken if before is None else max(taken, before)

    def beside(self, way: Way) -> int:
        """Bytes that are reckoned beside a way's step."""
        return self._noted.get(_kind(way), self._plain)

    def reckoned(self, way: Way) -> int:
        """Bytes that are reckoned of all of a run."""
        return way.total + self.beside(way)


def _kind(way: Way) -> tuple[Residency, StepOptions]:
    """Ways that differ alone in how many layers they stream, or keep if they keep any."""
    kept = min(way.residency.kept_layers, 1)
    return replace(way.residency, streamed_layers=0, kept_layers=kept), way.options


def least_count(way: Way, totals: list[int]) -> int:
    """How many layers come and go where the device shall hold least."""
    return min(range(len(totals)), key=totals.__getitem__)


def streaming(layers: list[int], staying: list[int], blocks: list[int]) -> list[int]:
    """What the device holds more, or less, when the last 0, 1, 2, … layers come and go.

    Args:
        layers: Bytes of each where it comes and goes.
        staying: The same where it stays.
        blocks: Those of a streamed head, which take turns in the same places as layers.
    """
    without, saved, more = _places(blocks), 0, [0]
    for number in reversed(range(len(layers))):
        saved += staying[number]
        more.append(_places([*blocks, *layers[number:]]) - without - saved)
    return more


def _places(sections: list[int]) -> int:
    """Bytes of the places that sections take turns in."""
    return min(len(sections), PLACES) * max(sections, default=0)
