"""What is computed without a gradient, texts and evaluations, within the memory that there is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from qlora_wgpu.config import Config, DeviceConfig, LoraConfig
from qlora_wgpu.data import Dataset, bucket_length
from qlora_wgpu.errors import OutOfMemoryError
from qlora_wgpu.families.parts.config import longest_text
from qlora_wgpu.generation.engine import batch_sizes
from qlora_wgpu.generation.prefill import largest_batch
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.memory import room
from qlora_wgpu.graph.plan import Plan
from qlora_wgpu.limits import MIB
from qlora_wgpu.model.budget import (
    IN_BUFFERS,
    Beside,
    Fit,
    PlansOf,
    fit_inference_to_budget,
    planned,
    reading_memory,
    waiting_in_words,
)
from qlora_wgpu.model.memory_plan import (
    KeepDequantized,
    copied_bytes,
    has_room,
    laid_out_for,
    with_kept,
)
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.steps import TrainingOptions
from qlora_wgpu.ops.kv_cache import KVCache
from qlora_wgpu.ops.loss import PLAIN, Objective
from qlora_wgpu.runs.memory import require_bindings, require_host_room, text_plans
from qlora_wgpu.training import Observer, training_options

# ---- weights that are kept dequantized -----------------------------------------------------------


def with_dequantized(layout: ModelPlan, settings: Config, device: Device) -> ModelPlan:
    """A run's layout to begin with, which ``settled`` may change."""
    asked = settings.device.keep_dequantized
    return laid_out_for(layout, asked, is_cpu=device.is_cpu, budget=device.budget)


def kept_to_measure(
    layout: ModelPlan,
    plans_of: PlansOf,
    device: Device,
    budget: int | None,
    asked: KeepDequantized,
    copies: int,
) -> ModelPlan:
    """A layout that measures rows with dequantized weights, where they are asked for and fit.

    Args:
        layout: The model without them, as it keeps the budget.
        plans_of: All that will be computed of a layout.
        device: The device.
        budget: Bytes of it that there are, if they are bounded.
        asked: Whether they are kept; ``"auto"`` as training does.
        copies: Bytes of copies that texts read beside.
    """
    bounded = device.budget is not None
    if asked is False or not layout.dequantized_bytes:
        return layout
    if asked == "auto" and not bounded and not device.is_cpu:
        return layout
    kept, streams = with_kept(layout), bool(layout.offload.streamed_layers)
    taken = copies + sum(reading_memory(plans_of(kept), kept).values())
    fits = budget is None or (taken <= budget and not streams)
    if asked is True:
        if not fits:
            raise _no_room(layout, "measuring", budget or 0)
        return kept
    return kept if fits and (not device.is_cpu or has_room(taken)) else layout


def _no_room(layout: ModelPlan, what: str, budget: int) -> OutOfMemoryError:
    return OutOfMemoryError(
        "device.keep_dequantized has no room: weights that are kept dequantized take "
        f"{layout.dequantized_bytes / MIB:,.0f} MiB, and {what} with them more than "
        f"the {budget / MIB:,.0f} MiB there are; set it to auto, or raise device.memory"
    )


def settled(
    fitted: Fit,
    settings: DeviceConfig,
    device: Device,
    budget: int | None,
    accumulation: int,
    beside: Beside,
) -> Fit:
    """A fitted step with dequantized weights, or without, now that its memory is known."""

    def taken(way: Fit) -> int:
        return way.total + beside(way.layout, way.options)

    def again(*, kept: bool) -> Fit:
        return planned(with_kept(fitted.layout, kept=kept), fitted.options, accumulation)

    asked, is_kept = settings.keep_dequantized, fitted.offload.dequantized
    if asked is True and not is_kept:
        assert budget is not None
        raise _no_room(fitted.layout, "training", budget)
    if asked != "auto":
        return fitted
    if is_kept:
        return fitted if has_room(taken(fitted)) else again(kept=False)
    if device.budget is None or fitted.offload.streamed_layers:
        return fitted
    kept = again(kept=True)
    fits = taken(kept) <= device.budget and (not device.is_cpu or has_room(taken(kept)))
    return kept if fits and kept.layout.dequantize_plan is not None else fitted


# ---- texts and rows, within the room -------------------------------------------------------------

_PROMPT, _ANSWER = 1024, 256  # tokens, where nobody says how many
_OTHER_LENGTHS = 8  # programs that are kept beside those that are planned


class InferenceWorkload(Protocol):
    """Something that is computed without a gradient."""

    @property
    def measures(self) -> bool:
        """Whether rows are, of which every micro-batch dequantizes the weights."""

    @property
    def writes(self) -> bool:
        """Whether texts are, which may read copies of the weights (``model/memory_plan.py``)."""

    def plans(self, layout: ModelPlan) -> Sequence[Plan]:
        """Plans of all of it; those with the largest slots come first."""


@dataclass(frozen=True)
class GenerationWorkload:
    """Texts that grow."""

    prompt: int  # tokens of the longest prompt
    capacity: int  # most tokens of a text
    count: int = 1  # how many grow at a time
    others: tuple[LoraConfig, ...] = ()  # adapters that they may have instead of the model's own
    measures = False
    writes = True

    @classmethod
    def of(
        cls, base: Pretrained, prompt: int = _PROMPT, answer: int = _ANSWER, count: int = 1
    ) -> GenerationWorkload:
        """Texts of so many tokens, at most as many as a model takes."""
        limit = longest_text(base.config) or prompt + answer
        return cls(min(prompt, limit), min(prompt + answer, limit), count)

    def plans(self, layout: ModelPlan) -> Sequence[Plan]:
        """The largest prompts, and a token after them, with each shape of adapter."""
        prompts = largest_batch(self.prompt, self.capacity, self.count)
        sizes = [prompts, *((rows, 1) for rows in batch_sizes(self.count))]
        cache = KVCache(self.capacity, self.count)
        layouts = [layout]
        for other in map(layout.with_adapter, self.others):
            if all(other.adapter.shape != each.adapter.shape for each in layouts):
                layouts.append(other)
        return [plan for each in layouts for plan in text_plans(each, cache, sizes)]


@dataclass(frozen=True)
class CombinedWorkload:
    """Several of them, one after the other."""

    parts: Sequence[InferenceWorkload]

    @property
    def measures(self) -> bool:
        """Whether any does."""
        return any(part.measures for part in self.parts)

    @property
    def writes(self) -> bool:
        """Whether any does."""
        return any(part.writes for part in self.parts)

    def plans(self, layout: ModelPlan) -> Sequence[Plan]:
        """All their plans, those with the largest slots first."""
        plans = [plan for part in self.parts for plan in part.plans(layout)]
        return sorted(plans, key=lambda plan: -plan.activation_bytes)


@dataclass(frozen=True)
class Rows:
    """Rows whose loss is measured."""

    count: int  # rows of a micro-batch
    length: int  # tokens of the longest
    objective: Objective = PLAIN  # what is measured
    measures = True
    writes = False

    @classmethod
    def of(cls, settings: Config, rows: Dataset) -> Rows:
        """A data set's."""
        longest = max(settings.data.max_seq_length, rows.longest)
        length = bucket_length(rows.longest, longest)
        objective = training_options(settings.train).objective
        return cls(settings.rows_at_once, length, objective)

    def plans(self, layout: ModelPlan) -> Sequence[Plan]:
        """The longest micro-batch; shorter ones take its slots."""
        options = TrainingOptions(objective=self.objective)
        return [layout.step(options.step("loss", self.count, self.length)).plan]


def read_within_room(
    layout: ModelPlan,
    reading: InferenceWorkload,
    device: Device,
    observer: Observer,
    keep_dequantized: KeepDequantized = False,
) -> ModelPlan:
    """A layout that keeps within ``device.memory``: what has no room waits in host memory."""
    asked = keep_dequantized if reading.measures else False
    copies = copied_bytes(layout, device.budget) if reading.writes else 0
    budget = device.budget if device.budget is not None else room(device)
    if budget is None:
        layout = kept_to_measure(layout, reading.plans, device, None, asked, copies)
        require_bindings(layout, reading.plans(layout), device)
        return layout
    beside = _shorter(reading_memory(reading.plans(layout)))
    fitted = fit_inference_to_budget(layout, reading.plans, budget - beside)
    fitted = kept_to_measure(fitted, reading.plans, device, budget - beside, asked, copies)
    plans = reading.plans(fitted)
    require_bindings(fitted, plans, device)
    memory = reading_memory(plans, fitted)
    observer.planned(memory)
    if words := _in_words(fitted):
        observer.note(f"to keep within {budget / MIB:,.0f} MiB of device memory, {words}")
    require_host_room(
        fitted, fitted.weights_on_host(), device, sum(memory.values()), observer, plans,
        trains=False,
    )  # fmt: skip
    return fitted


def _in_words(layout: ModelPlan) -> str:
    """What waits in host memory and what is given up; empty where nothing is."""
    waiting = waiting_in_words(layout.offload, layout.num_layers)
    buffers = IN_BUFFERS if layout.offload.in_buffers else ""
    return "; ".join(filter(None, (waiting and f"{waiting} in host memory", buffers)))


def _shorter(memory: Counter[str]) -> int:
    """Bytes that programs of other lengths take beside: their parameters and inputs."""
    return _OTHER_LENGTHS * (memory["uniforms"] + memory["inputs"] + memory["tables"])
