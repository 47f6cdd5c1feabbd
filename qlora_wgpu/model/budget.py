"""The cheapest offload plan with which a training step, or inference, fits a memory budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from qlora_wgpu.errors import OutOfMemoryError
from qlora_wgpu.gpu.limits import buffer_bytes, memory_bytes
from qlora_wgpu.graph.offload import NUM_BUFFERS
from qlora_wgpu.graph.plan import Plan
from qlora_wgpu.graph.program import pool_bytes
from qlora_wgpu.limits import MIB
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.model.offload_plan import OffloadPlan
from qlora_wgpu.model.steps import PlannedStep, StepOptions

LINK = 5e9  # bytes per second between host and device, measured for uploads to a GPU
_REMATERIALIZED = "outputs of norms and gated units are recomputed in the backward pass"
IN_BUFFERS = "intermediates lie in buffers instead of textures, which is slower here"
_SINGULAR = {"the input embedding", "lm_head"}

# ---- a planned step --------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """A planned step within a budget."""

    layout: ModelPlan
    options: StepOptions  # the step's; checkpointing may have been turned on
    memory: Counter[str]  # bytes on the device by kind
    host_memory: Counter[str]  # bytes of what is offloaded, by kind
    moved: int  # bytes transferred between host and device per optimizer step
    work: tuple[int, int]  # floating-point operations and bytes of memory traffic per micro-batch

    @property
    def offload(self) -> OffloadPlan:
        return self.layout.offload

    @property
    def seconds(self) -> float:
        """How long an optimizer step's transfers take if nothing overlaps with them."""
        return self.moved / LINK

    @property
    def total(self) -> int:
        return sum(self.memory.values())

    def in_words(self) -> str:
        """A sentence on what is recomputed, what is offloaded and what that costs."""
        again = self._again_in_words()
        words = offloaded_in_words(self.offload, self.layout.num_layers)
        if not words:
            return again or "nothing is recomputed or offloaded"
        nbytes, mapped = sum(self.host_memory.values()), self.layout.placement.mapped_bytes
        on_disk = f", {mapped / MIB:,.0f} MiB on disk" if mapped else ""
        return (
            f"{words} in host memory ({nbytes / MIB:,.0f} MiB{on_disk}); {self.moved / 1e9:,.2g} "
            f"GB per step are transferred, about {self.seconds:,.2g} s at {LINK / 1e9:g} GB/s"
            + (again and f"; {again}")
        )

    @property
    def recomputed(self) -> str:
        """Which layers are recomputed, if any are: for a table, and a sentence."""
        layers, kept = self.layout.num_layers, self.offload.kept_layers
        return f"{layers - kept} of {layers} layers" if kept else "layers"

    def _again_in_words(self) -> str:
        offload, parts = self.offload, []
        if self.options.checkpointing:
            together = offload.layers_per_segment
            few = "" if together == 1 else f", {together} at a time"
            verb = "is" if offload.kept_layers == self.layout.num_layers - 1 > 0 else "are"
            parts.append(f"{self.recomputed} {verb} recomputed in the backward pass{few}")
        if offload.remakes:
            parts.append(_REMATERIALIZED)
        if offload.in_buffers:
            parts.append(IN_BUFFERS)
        return ", and ".join(parts)


def offloaded_in_words(offload: OffloadPlan, layers: int) -> str:
    """What is offloaded of a model with ``layers`` layers, and the verb; empty for nothing."""
    named = [sentence for _, sentence in offload.in_words(layers)]
    if not named:
        return ""
    listed = " and ".join(filter(None, (", ".join(named[:-1]), named[-1])))
    return f"{listed} {'is' if len(named) == 1 and named[0] in _SINGULAR else 'are'} kept"


def planned(
    layout: ModelPlan, options: StepOptions, accumulation: int, step: PlannedStep | None = None
) -> Fit:
    """A model's step, or the given one, with the memory it takes and the bytes it transfers."""
    step = step or layout.step(options)
    moved = accumulation * (step.plan.host_transfer_bytes + step.batch.embedded_bytes)
    if layout.offload.host_moments:
        moved += 2 * layout.adapter.moments.nbytes  # there and back
    memory, on_host = (of(options, step.plan) for of in (layout.memory, layout.host_memory))
    work = step.plan.flops, step.plan.memory_traffic
    return Fit(layout, options, memory, on_host, moved, work)


# ---- candidates ------------------------------------------------------------------------------

BesidesStep = Callable[[ModelPlan, StepOptions], int]
Kind = tuple[OffloadPlan, StepOptions]


@dataclass(frozen=True)
class Candidate:
    """An offload plan that is considered, with an estimate of its cost and its memory."""

    offload: OffloadPlan
    options: StepOptions
    seconds: float  # added to an optimizer step by offloading
    total: int  # bytes on the device

    @property
    def cost(self) -> tuple[float, int]:
        return self.seconds, self.total

    @property
    def kind(self) -> Kind:
        """Equal for candidates that differ only in how many layers they stream or keep."""
        kept = min(self.offload.kept_layers, 1)
        return replace(self.offload, streamed_layers=0, kept_layers=kept), self.options


class Overhead:
    """A run's memory besides its step: exact for planned candidates, estimated for others."""

    def __init__(self, besides: BesidesStep | None, plain: Fit) -> None:
        self._besides = besides
        self._exact: dict[Kind, int] = {}
        self._noted: dict[Kind, int] = {}
        self._plain = self.taken(plain) - plain.total

    def taken(self, found: Fit) -> int:
        if self._besides is None:
            return found.total
        key = found.offload, found.options
        if key not in self._exact:
            self._exact[key] = self._besides(found.layout, found.options)
        return found.total + self._exact[key]

    def note(self, candidate: Candidate, found: Fit) -> None:
        """Records the error of an estimate: the largest of any candidate of its kind counts."""
        wrong = self.taken(found) - candidate.total
        self._noted[candidate.kind] = max(wrong, self._noted.get(candidate.kind, wrong))

    def estimate(self, candidate: Candidate) -> int:
        return candidate.total + self._noted.get(candidate.kind, self._plain)


def streaming(layers: list[int], staying: list[int], blocks: list[int]) -> list[int]:
    """How the bytes on the device change when the last 0, 1, 2, … layers are streamed.

    ``layers`` are each layer's bytes if it is streamed, ``staying`` if it is resident, ``blocks``
    those of a streamed head, which shares the layers' buffers.
    """
    without, saved, more = _stream_bytes(blocks), 0, [0]
    for number in reversed(range(len(layers))):
        saved += staying[number]
        more.append(_stream_bytes([*blocks, *layers[number:]]) - without - saved)
    return more


def _stream_bytes(groups: list[int]) -> int:
    return min(len(groups), NUM_BUFFERS) * max(groups, default=0)


# ---- training --------------------------------------------------------------------------------

# How many layers are recomputed at once, and whether cheap outputs are rematerialized: with several
# layers that saves more than with one, at almost no cost.
_RECOMPUTED = ((1, False), (1, True), (2, True), (3, True), (4, True))
_KEPT = ((1, False), (1, True))


def fit_to_budget(
    layout: ModelPlan,
    options: StepOptions,
    budget: int | None,
    *,
    accumulation: int = 1,
    flops_per_second: float = 1e13,
    bytes_per_second: float = 5e11,
    besides: BesidesStep | None = None,
) -> Fit:
    """Lays a model out in the cheapest way with which its longest training step fits a budget.

    A budget of None is unlimited; ``accumulation`` is the number of micro-batches per optimizer
    step. The device's approximate speed weighs recomputation against transfers. The last argument
    gives the run's memory besides a step that is planned this way.
    """
    rates = flops_per_second, bytes_per_second
    return Search(layout, options, accumulation, rates).within(budget, besides)


def _mib(nbytes: int) -> str:
    """Rounded up, so that the reported amount suffices."""
    return f"{-(-nbytes // MIB):,} MiB"


class Search:
    """Searches for the cheapest plan within budgets; each plan is made once.

    A step is planned before it runs, so its memory is known. The few ways of recomputing layers are
    traced, with the head on the device and, if nothing cheaper suffices, streamed. What the other
    measures save is estimated, and the chosen candidate is planned to verify it.
    """

    def __init__(
        self,
        layout: ModelPlan,
        options: StepOptions,
        accumulation: int = 1,
        rates: tuple[float, float] = (1e13, 5e11),
    ) -> None:
        """Plans the longest step of a model that is entirely on the device.

        ``rates`` are the device's operations, and bytes of memory traffic, per second.
        """
        self._layout, self._options = layout, options
        self._accumulation, self._rates = accumulation, rates
        self._fits: dict[Kind, Fit] = {}
        self._plain = self._planned(layout.offload, options)
        # Textures, if there are any, are given up first.
        self._in_buffers = layout.profile.in_textures

    @cached_property
    def _streamed(self) -> tuple[list[int], list[int]]:
        """Bytes of each layer, and of each block of the head, if they are streamed."""
        head = self._layout.head_options[-1]
        every = OffloadPlan(streamed_layers=self._layout.num_layers, streamed_head=head)
        layout = self._layout.changed(offload=every)
        return layout.placement.group_bytes, layout.placement.head_block_bytes

    def within(self, budget: int | None, besides: BesidesStep | None = None) -> Fit:
        """The cheapest plan that fits a budget; arguments as for ``fit_to_budget``."""
        plain = self._plain
        if budget is None:
            return plain
        more = Overhead(besides, plain)
        if more.taken(plain) <= budget:
            return plain
        while candidate := self._cheapest(budget, more):
            found = self._planned(candidate.offload, candidate.options)
            if more.taken(found) <= budget:
                return self._grown(found, budget, more)
            more.note(candidate, found)  # candidates differ in their overhead
        least = self.least(besides)
        if (taken := more.taken(least)) <= budget:
            return least
        available = f"{budget / MIB:,.1f}".removesuffix(".0")
        raise OutOfMemoryError(
            f"training needs at least {_mib(taken)} of device memory, {_mib(taken - budget)} more "
            f"than the {available} MiB available, even with everything possible offloaded: lower "
            "data.max_seq_length, train.per_device_train_batch_size or lora.r, or raise "
            "device.memory"
        )

    def least(self, besides: BesidesStep | None = None) -> Fit:
        """The plan that takes the minimum of memory, whatever it costs.

        Candidates are planned in the order of their estimates, until no remaining estimate is below
        the smallest plan.
        """
        more = Overhead(besides, self._plain)
        candidates = [
            min(several, key=lambda candidate: candidate.total)
            for streamed in self._layout.head_options
            for base in self._bases(streamed=streamed)
            for several in self._with_weights(self._traced(*base))
        ]
        least: Fit = self._plain
        for candidate in sorted(candidates, key=more.estimate):
            if more.estimate(candidate) >= more.taken(least):
                break
            found = self._planned(candidate.offload, candidate.options)
            least = min(least, found, key=more.taken)
        return least

    def _planned(self, offload: OffloadPlan, options: StepOptions) -> Fit:
        key = offload, options
        if key not in self._fits:
            layout = self._layout
            if offload != layout.offload:
                layout = layout.changed(offload=offload)
            step = layout.sized(options)
            self._fits[key] = planned(layout, options, self._accumulation, step)
        return self._fits[key]

    def _cheapest(self, budget: int, more: Overhead) -> Candidate | None:
        """The cheapest candidate that is estimated to fit a budget, with as few streamed layers."""
        best: Candidate | None = None
        for streamed in self._layout.head_options:
            for base in self._bases(streamed=streamed):
                if best is not None and self._least_seconds(*base) >= best.seconds:
                    continue
                for several in self._with_weights(self._traced(*base)):
                    fitting = (each for each in several if more.estimate(each) <= budget)
                    plain = next(fitting, several[0])
                    for candidate in (plain, self._keeping(plain, base, budget, more)):
                        fits = more.estimate(candidate) <= budget
                        if fits and (best is None or candidate.cost < best.cost):
                            best = candidate
        return best

    def _may_keep(self, offload: OffloadPlan, options: StepOptions) -> bool:
        """Whether a plan recomputes layers one by one though the step does not require it."""
        asked = options.checkpointing and not self._options.checkpointing
        return asked and offload.layers_per_segment == 1 and not offload.offload_layer_inputs

    def _keeping(self, candidate: Candidate, base: Kind, budget: int, more: Overhead) -> Candidate:
        """A candidate with as many layers kept, instead of recomputed, as fit.

        The first one is estimated to take nothing, since it is live only while no other is
        recomputed, and all further ones to take the same.
        """
        layers = self._layout.num_layers
        if layers == 1 or not self._may_keep(*base):
            return candidate
        none, all_of_them = self._traced(*base), self._traced(base[0], self._options)
        nbytes = -(-(all_of_them.total - none.total) // (layers - 1))
        some = replace(candidate, offload=replace(candidate.offload, kept_layers=1))
        room = budget - more.estimate(some)
        if nbytes <= 0 or room < 0:
            return candidate
        kept = min(1 + room // nbytes, layers - 1)
        return Candidate(
            replace(candidate.offload, kept_layers=kept),
            candidate.options,
            candidate.seconds - kept * (none.seconds - all_of_them.seconds) / layers,
            candidate.total + (kept - 1) * nbytes,
        )

    def _grown(self, found: Fit, budget: int, more: Overhead) -> Fit:
        offload, options = found.offload, found.options
        while self._may_keep(offload, options) and (
            offload.kept_layers < self._layout.num_layers - 1
        ):
            offload = replace(offload, kept_layers=offload.kept_layers + 1)
            larger = self._planned(offload, options)
            if more.taken(larger) > budget:
                break
            found = larger
        return found

    def _bases(self, *, streamed: bool) -> Iterator[Kind]:
        embedding = streamed and self._layout.tied
        # If layers are kept, GPUs always rematerialize cheap outputs.
        plain = _KEPT[:1] if self._layout.profile.remakes else _KEPT
        for offloaded in (False, True):
            for checkpointing in dict.fromkeys((self._options.checkpointing, True)):
                if offloaded and not checkpointing:
                    continue
                options = replace(self._options, checkpointing=checkpointing)
                for together, remakes in _RECOMPUTED if checkpointing else plain:
                    base = OffloadPlan(
                        embedding, offloaded, together, streamed_head=streamed, remakes=remakes,
                        in_buffers=self._in_buffers,
                    )  # fmt: skip
                    yield base, options

    def _least_seconds(self, offload: OffloadPlan, options: StepOptions) -> float:
        """A lower bound of a plan's cost, known without making it."""
        without = replace(offload, offload_layer_inputs=False)
        if offload.offload_layer_inputs and (without, options) in self._fits:
            return self._traced(without, options).seconds
        if offload.streamed_head:
            by_itself = OffloadPlan(
                self._layout.tied, streamed_head=True, in_buffers=self._in_buffers
            )
            return self._traced(by_itself, self._options).seconds
        return 0.0

    def _traced(self, offload: OffloadPlan, options: StepOptions) -> Candidate:
        """A planned candidate, whose cost is its transfers and its recomputation."""
        found = self._planned(offload, options)
        more = zip(found.work, self._plain.work, self._rates, strict=True)
        computing = sum(max(own - asked, 0) / rate for own, asked, rate in more)
        seconds = found.seconds + self._accumulation * computing
        return Candidate(offload, options, seconds, found.total)

    def _with_weights(self, base: Candidate) -> Iterator[list[Candidate]]:
        """A candidate with the embedding and the moments on the device or the host.

        Each comes with the last 0, 1, 2, … layers streamed.
        """
        layout, (layers, blocks) = self._layout, self._streamed
        rows = base.options.batch * base.options.seq
        moments = layout.adapter.moments.nbytes
        changes = streaming(
            layers, layout.placement.layer_bytes, blocks if base.offload.streamed_head else []
        )
        uploaded = [sum(layers[len(layers) - count :]) for count in range(len(changes))]
        for embedding in (False, True) if layout.embedding_bytes else (False,):
            for on_host in (False, True) if layout.adapter.forms.updates else (False,):
                passing = rows * layout.embedded_row_bytes if embedding else 0
                # The rows, and their indices, which the lookup reads.
                taken = buffer_bytes(passing) + buffer_bytes(4 * rows)
                saved = buffer_bytes(layout.embedding_bytes) - taken if embedding else 0
                moved = self._accumulation * passing
                if on_host:
                    saved += moments - layout.moments_passing
                    moved += 2 * moments
                offload = replace(
                    base.offload,
                    host_embedding=embedding or base.offload.host_embedding,
                    host_moments=on_host,
                )
                yield [
                    Candidate(
                        replace(offload, streamed_layers=count),
                        base.options,
                        base.seconds + (moved + self._accumulation * 2 * uploaded[count]) / LINK,
                        base.total - saved + change,
                    )
                    for count, change in enumerate(changes)
                ]


# ---- inference -------------------------------------------------------------------------------

PlansOf = Callable[[ModelPlan], Sequence[Plan]]


def fit_inference_to_budget(layout: ModelPlan, plans_of: PlansOf, budget: int) -> ModelPlan:
    """Lays a model out so that its inference fits a budget.

    Textures are given up before anything is offloaded; then the input embedding is offloaded, of
    which few rows are read; then the weights of as few layers as necessary; then the head.
    """
    if (least := _total(layout, plans_of)) <= budget:
        return layout
    plain = OffloadPlan(in_buffers=layout.profile.in_textures)
    base = replace(plain, host_embedding=layout.embedding_bytes > 0)
    offloads = [plain, base]
    for head in layout.head_options:
        most = replace(base, streamed_layers=layout.num_layers, streamed_head=head)
        streamed = layout.changed(offload=most)
        all_streamed = _total(streamed, plans_of)
        count = _fewest(streamed.placement.group_bytes, all_streamed, budget)
        least = min(least, all_streamed)
        offloads.append(replace(most, streamed_layers=count))
    for offload in dict.fromkeys(offloads):
        fitted = layout.changed(offload=offload)
        if _total(fitted, plans_of) <= budget:
            return fitted
    available = max(budget, 0)  # inputs and the like may have taken more than all of it
    raise OutOfMemoryError(
        f"this needs at least {least / MIB:,.0f} MiB of device memory, "
        f"{(least - available) / MIB:,.0f} MiB more than the {available / MIB:,.0f} MiB available, "
        "even with everything possible offloaded: use shorter sequences, or raise device.memory "
        "(--memory)"
    )


def reading_memory(plans: Sequence[Plan], layout: ModelPlan | None = None) -> Counter[str]:
    """Bytes on the device by kind, for programs that share slots and run in turn."""
    if layout is not None and layout.dequantize_plan is not None:
        whole = reading_memory([layout.dequantize_plan, *plans])
        whole["uniforms"] -= layout.dequantize_plan.uniform_bytes  # which do not stay
        return +whole
    memory: Counter[str] = Counter({"activations": pool_bytes(plans)})
    for storage in dict.fromkeys(storage for plan in plans for storage in plan.storages):
        if storage.group is None:
            memory[storage.kind] += memory_bytes(storage.nbytes, texture=storage.texture)
    for stream in dict.fromkeys(stream for plan in plans for stream in plan.streams):
        memory["staging"] += stream.device_bytes
    memory["uniforms"] = sum(plan.uniform_bytes for plan in plans)
    return +memory


def _total(layout: ModelPlan, plans_of: PlansOf) -> int:
    return sum(reading_memory(plans_of(layout)).values())


def _fewest(layers: list[int], all_streamed: int, budget: int) -> int:
    """The minimum number of layers that have to be streamed; all if not even that suffices.

    Each of the others adds its bytes to the memory taken if all are streamed.
    """
    room, count = budget - all_streamed, len(layers)
    for nbytes in layers:  # the last ones are streamed
        room -= nbytes
        if room < 0 or count <= 3:  # of three, two would always be on the device
            break
        count -= 1
    return count
