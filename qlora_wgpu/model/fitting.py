"""The cheapest way to keep a training step within a budget of device memory.

A step is planned before it runs, so each way's memory is known: the search traces the few ways of
recomputing layers, with the head on the device and, where nothing cheaper is enough, streamed;
reckons what the other measures save, and plans the way it has chosen once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from qlora_wgpu.errors import OutOfMemoryError
from qlora_wgpu.graph.section import PLACES
from qlora_wgpu.limits import MIB
from qlora_wgpu.model.fit import LINK, Fit, planned
from qlora_wgpu.model.layout import ModelLayout
from qlora_wgpu.model.options import StepOptions
from qlora_wgpu.model.residency import Residency

Beside = Callable[[ModelLayout, StepOptions], int]
# How many layers are recomputed at once, and whether cheap outputs are made again. With several
# layers that saves more than it does with one, at a price that is next to nothing.
_RECOMPUTED = ((1, False), (1, True), (2, True), (3, True), (4, True))
_KEPT = ((1, False), (1, True))


@dataclass(frozen=True)
class _Way:
    """A way that is considered, with what it is reckoned to cost and to take."""

    residency: Residency
    options: StepOptions
    seconds: float
    total: int


def fit(
    layout: ModelLayout,
    options: StepOptions,
    budget: int | None,
    *,
    accumulation: int = 1,
    flops_per_second: float = 1e13,
    bytes_per_second: float = 5e11,
    beside: Beside | None = None,
) -> Fit:
    """Lays a model out so that its training step keeps a budget, in the cheapest way.

    Args:
        layout: The model with everything on the device.
        options: The longest training step.
        budget: Bytes of device memory; None for as much as it takes.
        accumulation: Micro-batches of an optimizer step.
        flops_per_second: About how fast the device is, to weigh recomputation against traffic.
        bytes_per_second: About how fast it reads and writes its memory, likewise.
        beside: Bytes that the run takes beside a step that is planned so.

    Raises:
        OutOfMemoryError: If no way keeps the budget; says by how much.
    """
    rates = flops_per_second, bytes_per_second
    return Search(layout, options, accumulation, rates).within(budget, beside)


def _cost(way: _Way) -> tuple[float, int]:
    return way.seconds, way.total


def _mib(nbytes: int) -> str:
    """Rounded up, so that what is said to be enough is."""
    return f"{-(-nbytes // MIB):,} MiB"


class Search:
    """The ways of keeping budgets; each is planned once.

    Args:
        layout: The model with everything on the device.
        options: The longest training step.
        accumulation: Micro-batches of an optimizer step.
        rates: About how many operations, and bytes of its memory, the device makes in a second.
    """

    def __init__(
        self,
        layout: ModelLayout,
        options: StepOptions,
        accumulation: int = 1,
        rates: tuple[float, float] = (1e13, 5e11),
    ) -> None:
        self._layout, self._options = layout, options
        self._accumulation, self._rates = accumulation, rates
        self._known: dict[tuple[Residency, StepOptions], _Way] = {}
        self._plain = planned(layout, options, accumulation)

    @cached_property
    def _streamed(self) -> ModelLayout:
        layers = self._layout.num_layers
        return self._layout.waiting(Residency(streamed_layers=layers, streamed_head=True))

    @cached_property
    def _layers(self) -> list[int]:
        return self._streamed.section_bytes

    @cached_property
    def _blocks(self) -> list[int]:
        return self._streamed.head_block_bytes

    def within(self, budget: int | None, beside: Beside | None = None) -> Fit:
        """The cheapest way that keeps a budget.

        Args:
            budget: Bytes of device memory; None for as much as it takes.
            beside: Bytes that the run takes beside a step that is planned so.

        Raises:
            OutOfMemoryError: If no way keeps the budget; says by how much.
        """
        plain = self._plain
        if budget is None:
            return plain

        def taken(found: Fit) -> int:
            return found.total + (0 if beside is None else beside(found.layout, found.options))

        if taken(plain) <= budget:
            return plain
        room, least = budget - (taken(plain) - plain.total), plain
        while True:
            ways = self._ways(room)
            way = next((way for way in ways if way.total <= room), None)
            found = self._planned(way or min(ways, key=lambda way: way.total))
            least = min(least, found, key=taken)
            if way is None or taken(found) <= budget:
                break
            room -= taken(found) - budget  # other plans leave other things less room
        if taken(found) <= budget:
            return found
        more, there = taken(least) - budget, f"{budget / MIB:,.1f}".removesuffix(".0")
        raise OutOfMemoryError(
            f"training takes at least {_mib(taken(least))} of device memory, {_mib(more)} more "
            f"than the {there} MiB there are, even with all that can wait in host memory: lower "
            "data.max_seq_length, train.per_device_train_batch_size or lora.r, or raise "
            "device.memory"
        )

    def _planned(self, way: _Way) -> Fit:
        return planned(self._layout.waiting(way.residency), way.options, self._accumulation)

    def _ways(self, budget: int) -> list[_Way]:
        """Every combination of measures, each with as few streamed layers as it needs."""
        ways = sorted(self._with_head(budget, streamed=False), key=_cost)
        fitting = next((way for way in ways if way.total <= budget), None)
        head = Residency(self._layout.tied, streamed_head=True)
        by_itself = self._traced(head, self._options)
        if fitting is None or by_itself.seconds < fitting.seconds:
            ways = sorted([*ways, *self._with_head(budget, streamed=True)], key=_cost)
        return ways

    def _with_head(self, budget: int, *, streamed: bool) -> Iterator[_Way]:
        embedding = streamed and self._layout.tied
        for checkpointing in {self._options.checkpointing, True}:
            traced = replace(self._options, checkpointing=checkpointing)
            for together, remakes in _RECOMPUTED if checkpointing else _KEPT:
                for parked in (False, True) if checkpointing else (False,):
                    base = Residency(
                        embedding, parked, together, streamed_head=streamed, remakes=remakes
                    )
                    yield from self._with_weights(self._traced(base, traced), budget)

    def _traced(self, residency: Residency, options: StepOptions) -> _Way:
        """A way that is planned; it costs its traffic, and what it computes more than was asked."""
        if (residency, options) in self._known:
            return self._known[residency, options]
        found = planned(self._layout.waiting(residency), options, self._accumulation)
        asked, plan = self._layout.step(self._options).plan, found.layout.step(options).plan
        flops, nbytes = plan.flops - asked.flops, plan.passed_bytes - asked.passed_bytes
        computing = max(flops, 0) / self._rates[0] + max(nbytes, 0) / self._rates[1]
        seconds = found.seconds + self._accumulation * computing
        way = self._known[residency, options] = _Way(residency, options, seconds, found.total)
        return way

    def _with_weights(self, way: _Way, budget: int) -> Iterator[_Way]:
        """A way, and the same with the embedding, the moments and layers in host memory."""
        layout, layers = self._layout, self._layers
        rows = way.options.batch * way.options.seq
        moments = layout.adapter.moments.nbytes
        for embedding in (False, True) if layout.embedding_bytes else (False,):
            for on_host in (False, True):
                passing = rows * layout.embedded_row_bytes if embedding else 0
                saved = layout.embedding_bytes - passing if embedding else 0
                moved = self._accumulation * passing
                if on_host:
                    saved += moments - layout.moments_passing
                    moved += 2 * moments
                total = way.total - saved
                blocks = self._blocks if way.residency.streamed_head else []
                streamed = _fewest(layers, blocks, total, budget)
                total += _streaming(layers, blocks, streamed)
                moved += self._accumulation * 2 * sum(layers[len(layers) - streamed :])
                residency = replace(
                    way.residency, host_embedding=embedding or way.residency.host_embedding,
                    host_moments=on_host, streamed_layers=streamed,
                )  # fmt: skip
                yield _Way(residency, way.options, way.seconds + moved / LINK, total)


def _streaming(layers: list[int], blocks: list[int], count: int) -> int:
    """What the device holds more, or less, when the last layers come and go.

    They take turns in the same places as the blocks of a streamed head.
    """
    there = layers[len(layers) - count :] if count else []
    return _places([*blocks, *there]) - _places(blocks) - sum(there)


def _places(sections: list[int]) -> int:
    """Bytes of the places that sections take turns in."""
    return min(len(sections), PLACES) * max(sections, default=0)


def _fewest(layers: list[int], blocks: list[int], total: int, budget: int) -> int:
    """The fewest layers with which a total comes down to a budget; else all."""
    if total <= budget:
        return 0
    least = 1 if blocks else PLACES + 1  # so many would always be there
    counts = range(least, len(layers) + 1)
    fitting = (n for n in counts if total + _streaming(layers, blocks, n) <= budget)
    return next(fitting, len(layers))
