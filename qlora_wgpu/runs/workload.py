"""A training to be planned, what of it fits into a budget, and what fits on usual cards."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qlora_wgpu.config import DeviceConfig, LoraConfig, QuantConfig
from qlora_wgpu.errors import OutOfMemoryError, QLoRAError
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.kernel_config import GPU_PROFILE, Profile
from qlora_wgpu.gpu.memory import memory_size, room_of
from qlora_wgpu.graph.plan import Plan
from qlora_wgpu.limits import GIB
from qlora_wgpu.lora.flat_vector import FLOAT32, AdapterDtypes
from qlora_wgpu.model.budget import Fit, Search, fit_to_budget
from qlora_wgpu.model.memory_plan import KeepDequantized, has_room, with_kept
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.model.offload_plan import OffloadPlan
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.steps import StepOptions, TrainingOptions
from qlora_wgpu.ops.loss import PLAIN, Objective
from qlora_wgpu.runs.opening import device_of

# ---- a training and its device -------------------------------------------------------------------

_LARGEST_BINDING = (1 << 31) - 1  # what most cards allow


@dataclass(frozen=True)
class Workload:
    """The training that is to be planned."""

    pretrained: Pretrained  # the base model, of which config.json is known
    lora: LoraConfig  # the adapter
    quant: QuantConfig  # how the base's linear layers are stored
    compute_dtype: str  # type of matmul operands
    batch: int  # rows of a micro-batch
    seq: int  # tokens of a row
    checkpointing: bool  # whether layers are recomputed in the backward
    accumulation: int = 1  # micro-batches of a step
    forms: AdapterDtypes = FLOAT32  # in which types the adapter's gradient and moments are kept
    objective: Objective = PLAIN  # the loss that is minimized
    sides: int = 1  # rows of a micro-batch for each that the settings count: two of a pair

    @property
    def options(self) -> StepOptions:
        """Its longest step."""
        return TrainingOptions(self.checkpointing, self.objective).step(
            "train", self.batch, self.seq
        )


@dataclass(frozen=True)
class Target:
    """For what it is planned: an open GPU, or a common one where none is there."""

    name: str = "a GPU"  # the GPU's name
    max_binding: int = _LARGEST_BINDING  # bytes of its largest binding
    profile: Profile = GPU_PROFILE  # how kernels are cut for it
    nbytes: int | None = None  # bytes of its memory, where they are known
    is_host: bool = False  # whether its memory is the host's

    @classmethod
    def here(cls, settings: DeviceConfig | None = None) -> Target:
        """The GPU that a run would take here; a common one where there is none."""
        try:
            return cls.of(device_of(settings or DeviceConfig()))
        except QLoRAError:
            return cls()

    @classmethod
    def of(cls, device: Device) -> Target:
        """An open GPU."""
        nbytes = memory_size(device)
        return cls(device.name, device.max_binding, device.profile, nbytes, device.is_cpu)

    def layout(self, workload: Workload) -> ModelPlan:
        """The model laid out for it."""
        return ModelPlan(
            workload.pretrained,
            workload.lora,
            workload.quant,
            workload.compute_dtype,
            profile=self.profile,
            max_binding=self.max_binding,
            forms=workload.forms,
        )

    def memory(self, workload: Workload) -> Counter[str]:
        """Bytes on the device by kind."""
        return self.layout(workload).memory(workload.options)

    def total(self, workload: Workload) -> int | None:
        """All bytes; None where there is more than kernels can count."""
        return self.layout(workload).total(workload.options)

    def totals(self, workload: Workload, *, kept: bool = False) -> Totals:
        """``total`` of a workload in other sizes; with weights kept dequantized, if they are."""
        return Totals(with_kept(self.layout(workload), kept=kept), workload)

    def as_kept(
        self,
        layout: ModelPlan,
        options: StepOptions,
        asked: KeepDequantized,
        budget: int | None,
    ) -> ModelPlan:
        """A layout with weights kept dequantized, where training with these options keeps them.

        Args:
            layout: Without them, where they are not ``asked`` for in any case.
            options: Of the longest step.
            asked: ``device.keep_dequantized``.
            budget: Bytes that training may take, if somebody says how many.
        """
        if asked != "auto" or (budget is None and not self.is_host):
            return layout
        kept = with_kept(layout)
        total = kept.total(options)
        fits = total is not None and (budget is None or total <= budget)
        return kept if fits and (not self.is_host or has_room(total or 0)) else layout


class Totals:
    """All bytes of a training in several sizes, each planned once.

    Attributes:
        layout: The model.
    """

    def __init__(self, layout: ModelPlan, workload: Workload) -> None:
        """Plans nothing yet."""
        self.layout = layout
        self._workload = workload
        self._known: dict[StepOptions, int | None] = {}

    def __call__(self, **sizes: Any) -> int | None:
        """Bytes with this ``batch``, ``seq`` or ``checkpointing``; None if beyond counting."""
        options = self.options(**sizes)
        if options not in self._known:
            self._known[options] = self.layout.total(options)
        return self._known[options]

    def options(self, **sizes: Any) -> StepOptions:
        """A step's in these sizes."""
        return replace(self._workload, **sizes).options

    def with_offload(self, offload: OffloadPlan) -> Totals:
        """The same with what waits in host memory."""
        return Totals(self.layout.changed(offload=offload), self._workload)


def fitted_within(layout: ModelPlan, workload: Workload, budget: int) -> Fit | None:
    """How training keeps a budget; None where it cannot."""
    try:
        return fit_to_budget(layout, workload.options, budget, accumulation=workload.accumulation)
    except OutOfMemoryError:
        return None


# ---- what fits into a budget ---------------------------------------------------------------------

MOST_TOKENS = 65_536  # of a micro-batch; more are not looked for
# In which rows are tried: so far apart that a longer one takes more. Between neighbours that need
# not be so, since products of more rows are cut along their reduction less.
LENGTHS = (
    *range(64, 1024, 64),
    *(
        length
        for first in (1024 << n for n in range(6))
        for length in range(first, 2 * first, first // 16)
    ),
    MOST_TOKENS,
)


@dataclass(frozen=True)
class Fits:
    """The largest batch and sequence that a budget has room for."""

    batch: int  # most rows at the planned length; 0 for none
    seq: int  # most tokens of one row; 0 for none


def what_fits(totals: Totals, workload: Workload, budget: int) -> Fits:
    """The most rows at the planned length, and the most tokens of one row."""
    rows = range(1, max(MOST_TOKENS // workload.seq, 1) + 1)
    return Fits(
        largest_fitting(lambda n: totals(batch=n), budget, rows),
        largest_fitting(lambda n: totals(batch=1, seq=n), budget, LENGTHS),
    )


def remedy_for(totals: Totals, workload: Workload, budget: int) -> str:
    """The settings that cost least with which a workload fits; empty where none do.

    A smaller micro-batch changes nothing that is learnt and little of the speed, checkpointing
    costs about a third of it, and shorter rows lose what they cut.
    """
    rows = range(1, workload.batch + 1)
    for checkpointing in dict.fromkeys((workload.checkpointing, True)):

        def total(n: int, *, checkpointing: bool = checkpointing) -> int | None:
            return totals(batch=n, checkpointing=checkpointing)

        if batch := largest_fitting(total, budget, rows):
            return _in_keys(workload, batch, workload.seq, checkpointing)
    shorter = [length for length in LENGTHS if length < workload.seq]
    seq = largest_fitting(lambda n: totals(batch=1, seq=n, checkpointing=True), budget, shorter)
    return _in_keys(workload, 1, seq, True) if seq else ""


def _in_keys(workload: Workload, batch: int, seq: int, checkpointing: bool) -> str:
    """What differs from a workload, as it is written behind ``train run.yaml``."""
    keys = []
    batch = max(batch // workload.sides, 1)
    if batch * workload.sides != workload.batch:
        accumulation = -(-workload.batch * workload.accumulation // (batch * workload.sides))
        keys.append(f"train.per_device_train_batch_size={batch}")
        keys.append(f"train.gradient_accumulation_steps={accumulation}")
    if checkpointing != workload.checkpointing:
        keys.append("train.gradient_checkpointing=true")
    if seq != workload.seq:
        keys.append(f"data.max_seq_length={seq}")
    return " ".join(keys)


def largest_fitting(total: Callable[[int], int | None], budget: int, sizes: Sequence[int]) -> int:
    """The largest of some sizes whose total fits, where totals rise with the sizes; 0 for none.

    Totals grow about linearly, so few are made: that of the size that is told, and of the next
    larger one, which does not fit, are among them.

    Args:
        total: Bytes that a size takes; None for too many to count.
        budget: Bytes that there are.
        sizes: Rising.
    """
    low, high, made = -1, len(sizes), dict[int, int]()
    guess = 0
    while high - low > 1:
        taken = total(sizes[guess])
        made[sizes[guess]] = 2 * budget if taken is None else taken
        if taken is not None and taken <= budget:
            low = guess
        else:
            high = guess
        near = [sizes[i] for i in (low, high) if 0 <= i < len(sizes)]
        if len(near) == 1:  # nothing is there on the other side
            near = sorted(made, key=lambda size: abs(made[size] - budget))[:2]
        where = _where({size: made[size] for size in near}, budget)
        guess = min(max(bisect_right(sizes, where) - 1, low + 1), high - 1)
    return sizes[low] if low >= 0 else 0


def _where(made: dict[int, int], budget: int) -> float:
    """About the size that takes a budget, by the line through one or two of known totals."""
    (a, taken), *others = made.items()
    if not others:
        return max(min(8.0 * a, 2048.0), 1.1 * a * budget / taken)
    ((b, other),) = others
    slope = (other - taken) / (b - a)
    return a + (budget - taken) / slope if slope > 0 else 2 * max(a, b)


# ---- cards ---------------------------------------------------------------------------------------

SIZES = (4, 6, 8, 12, 16, 24, 48, 80)  # GB, as cards are sold: 2**30 bytes each
FLOPS, BYTES = 1e13, 5e11  # a second, of products and of the card's memory
_FEW_LAYERS = 8
_NEARLY = 1.1  # ways that are alike differ by a smaller factor


@dataclass(frozen=True)
class CardPlan:
    """A training on a card of some size."""

    gib: int  # the card's memory in GiB
    room: int  # bytes of it that training may take
    # The longest of ``LENGTHS`` that a row may have with all weights on the card, layers
    # recomputed; 0 for none
    resident_seq: int
    # The same with all in host memory that can be. The next longer one has no room in any way
    longest_seq: int
    fitted: Fit | None  # how the planned training keeps to the card; None where it cannot
    # How many times as long its step takes as with everything on a card and nothing recomputed, if
    # no traffic is hidden; None where it does not fit
    slow_down: float | None


def plans_for_cards(workload: Workload) -> tuple[CardPlan, ...]:
    """Plans a training for cards from 4 to 80 GB, until a card has room for everything.

    All cards are planned as a common GPU. Times are reckoned, never measured: operations over
    ``FLOPS``, bytes of the card's memory over ``BYTES``, traffic over ``LINK``, one after the
    other. So a slow-down is an upper bound for such a card.
    """
    return tuple(_plans(workload))


def _plans(workload: Workload) -> Iterator[CardPlan]:
    totals = Target().totals(replace(workload, batch=1, checkpointing=True))
    resident = totals.layout
    waiting = _Waiting(totals)
    kept = replace(workload, checkpointing=False).options
    search = Search(resident, kept, workload.accumulation, (FLOPS, BYTES))
    seconds = workload.accumulation * _computing(resident.sized(kept).plan)
    for gib in SIZES:
        room = room_of(gib * GIB)
        fitted = _fitted(search, room)
        resident_seq = largest_fitting(lambda n: totals(seq=n), room, LENGTHS)
        yield CardPlan(
            gib,
            room,
            resident_seq,
            waiting.longest(room, resident_seq),
            fitted,
            None if fitted is None else _seconds(fitted, workload.accumulation) / seconds,
        )
        if fitted is not None and not fitted.options.checkpointing and not fitted.moved:
            return


class _Waiting:
    """What rows of several lengths take with all in host memory that can wait."""

    def __init__(self, resident: Totals) -> None:
        layout = resident.layout
        self._resident = resident
        # A head's blocks, and gradients of all rows, may take more than it does itself.
        self._ways = [self._like(layout, streamed_head=head) for head in layout.head_options]

    def _like(self, layout: ModelPlan, *, streamed_head: bool) -> list[Totals]:
        """A way that takes about the least, and those that may take a little less."""
        way = replace(OffloadPlan.least(layout.num_layers), streamed_head=streamed_head)
        ways = [way, replace(way, remakes=False)]
        return [self._resident.with_offload(each) for each in ways]

    def longest(self, room: int, found: int) -> int:
        """The longest row that has room, of those that are tried."""
        for first, *_ in self._ways:
            longer = [length for length in LENGTHS if length > found]
            found = largest_fitting(lambda n: first(seq=n), room, longer) or found  # noqa: B023
        for seq in LENGTHS:
            if seq > found:
                if not self._fits_otherwise(seq, room):
                    break
                found = seq
        return found

    def _fits_otherwise(self, seq: int, room: int) -> bool:
        if self._resident.layout.num_layers <= _FEW_LAYERS:  # any may be the least of small models
            options = self._resident.options(seq=seq)
            return Search(self._resident.layout, options).least().total <= room
        for first, *others in self._ways:
            taken = first(seq=seq)
            if taken is None or taken > _NEARLY * room:
                continue
            for way in others:
                other = way(seq=seq)
                if other is not None and other <= room:
                    return True
        return False


def _fitted(search: Search, room: int) -> Fit | None:
    try:
        return search.within(room)
    except OutOfMemoryError:
        return None


def _seconds(fitted: Fit, accumulation: int) -> float:
    plan = fitted.layout.sized(fitted.options).plan
    return accumulation * _computing(plan) + fitted.seconds


def _computing(plan: Plan) -> float:
    return plan.flops / FLOPS + plan.memory_traffic / BYTES
