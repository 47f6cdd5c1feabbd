"""What is computed without a gradient, texts and evaluations, within the memory that there is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from qlora_wgpu.config import Config, LoraConfig
from qlora_wgpu.data import Dataset, bucket_length
from qlora_wgpu.families.parts.config import longest_text
from qlora_wgpu.generation.engine import batch_sizes
from qlora_wgpu.generation.prefill import largest_batch
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.memory import room
from qlora_wgpu.graph.plan import Plan
from qlora_wgpu.limits import MIB
from qlora_wgpu.model.budget import IN_BUFFERS, fit_reading, reading_memory, waiting_in_words
from qlora_wgpu.model.memory_plan import KeepDequantized, copied_bytes
from qlora_wgpu.model.model_plan import ModelLayout
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.steps import TrainingOptions
from qlora_wgpu.ops.kv_cache import KVCache
from qlora_wgpu.ops.loss import PLAIN, Objective
from qlora_wgpu.runs.bindings import require_bindings
from qlora_wgpu.runs.host_room import require_host_room
from qlora_wgpu.runs.keeping import kept_to_measure
from qlora_wgpu.runs.text_plans import text_plans
from qlora_wgpu.training import Observer, training_options

_PROMPT, _ANSWER = 1024, 256  # tokens, where nobody says how many
_OTHER_LENGTHS = 8  # programs that are kept beside those that are planned


class Reading(Protocol):
    """Something that is computed without a gradient."""

    @property
    def measures(self) -> bool:
        """Whether rows are, of which every micro-batch dequantizes the weights."""

    @property
    def writes(self) -> bool:
        """Whether texts are, which may read copies of the weights (``model/memory_plan.py``)."""

    def plans(self, layout: ModelLayout) -> Sequence[Plan]:
        """Plans of all of it; those with the largest slots come first."""


@dataclass(frozen=True)
class Texts:
    """Texts that grow.

    Attributes:
        prompt: Tokens of the longest prompt.
        capacity: Most tokens of a text.
        count: How many grow at a time.
        others: Adapters that they may have instead of the model's own.
    """

    prompt: int
    capacity: int
    count: int = 1
    others: tuple[LoraConfig, ...] = ()
    measures = False
    writes = True

    @classmethod
    def of(
        cls, base: Pretrained, prompt: int = _PROMPT, answer: int = _ANSWER, count: int = 1
    ) -> Texts:
        """Texts of so many tokens, at most as many as a model takes."""
        limit = longest_text(base.config) or prompt + answer
        return cls(min(prompt, limit), min(prompt + answer, limit), count)

    def plans(self, layout: ModelLayout) -> Sequence[Plan]:
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
class Several:
    """Several of them, one after the other."""

    parts: Sequence[Reading]

    @property
    def measures(self) -> bool:
        """Whether any does."""
        return any(part.measures for part in self.parts)

    @property
    def writes(self) -> bool:
        """Whether any does."""
        return any(part.writes for part in self.parts)

    def plans(self, layout: ModelLayout) -> Sequence[Plan]:
        """All their plans, those with the largest slots first."""
        plans = [plan for part in self.parts for plan in part.plans(layout)]
        return sorted(plans, key=lambda plan: -plan.activation_bytes)


@dataclass(frozen=True)
class Rows:
    """Rows whose loss is measured.

    Attributes:
        count: Rows of a micro-batch.
        length: Tokens of the longest.
        objective: What is measured.
    """

    count: int
    length: int
    objective: Objective = PLAIN
    measures = True
    writes = False

    @classmethod
    def of(cls, settings: Config, rows: Dataset) -> Rows:
        """A data set's."""
        longest = max(settings.data.max_seq_length, rows.longest)
        length = bucket_length(rows.longest, longest)
        objective = training_options(settings.train).objective
        return cls(settings.rows_at_once, length, objective)

    def plans(self, layout: ModelLayout) -> Sequence[Plan]:
        """The longest micro-batch; shorter ones take its slots."""
        options = TrainingOptions(objective=self.objective)
        return [layout.step(options.step("loss", self.count, self.length)).plan]


def read_within_room(
    layout: ModelLayout,
    reading: Reading,
    device: Device,
    observer: Observer,
    keep_dequantized: KeepDequantized = False,
) -> ModelLayout:
    """A layout that keeps within ``device.memory``: what has no room waits in host memory.

    Args:
        layout: The model, cut for the device.
        reading: What will be computed.
        device: The device.
        observer: Told what waits.
        keep_dequantized: Whether weights are kept dequantized where rows are measured; texts by
            themselves, of which only prompts would gain, keep none.

    Raises:
        OutOfMemoryError: If nothing makes it fit, or the host has no room for what waits.
    """
    asked = keep_dequantized if reading.measures else False
    copies = copied_bytes(layout, device.budget) if reading.writes else 0
    budget = device.budget if device.budget is not None else room(device)
    if budget is None:
        layout = kept_to_measure(layout, reading.plans, device, None, asked, copies)
        require_bindings(layout, reading.plans(layout), device)
        return layout
    beside = _shorter(reading_memory(reading.plans(layout)))
    fitted = fit_reading(layout, reading.plans, budget - beside)
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


def _in_words(layout: ModelLayout) -> str:
    """What waits in host memory and what is given up; empty where nothing is."""
    waiting = waiting_in_words(layout.residency, layout.num_layers)
    buffers = IN_BUFFERS if layout.residency.in_buffers else ""
    return "; ".join(filter(None, (waiting and f"{waiting} in host memory", buffers)))


def _shorter(memory: Counter[str]) -> int:
    """Bytes that programs of other lengths take beside: their parameters and inputs."""
    return _OTHER_LENGTHS * (memory["uniforms"] + memory["inputs"] + memory["tables"])
