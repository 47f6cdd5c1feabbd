"""All that a run computes, known from its data, and the device memory that it takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from qlora_wgpu.cluster.computing import received_gradient
from qlora_wgpu.config import Config
from qlora_wgpu.data import Dataset, bucket_length
from qlora_wgpu.errors import OutOfMemoryError
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.limits import ALIGNMENT
from qlora_wgpu.gpu.memory import room
from qlora_wgpu.gpu.timing import READ_AHEAD
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.plan import Plan, compile_plan
from qlora_wgpu.limits import MIB
from qlora_wgpu.lora.flat_vector import AdapterDtypes
from qlora_wgpu.model.adapter_state import norms_graph
from qlora_wgpu.model.budget import reading_memory
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.model.steps import StepKind, StepOptions, TrainingOptions
from qlora_wgpu.ops.kv_cache import KVCache
from qlora_wgpu.ops.moments import passing_parts
from qlora_wgpu.ops.preference import Preference
from qlora_wgpu.ops.tensor import add_to, fill_zero
from qlora_wgpu.runs.data import RunData
from qlora_wgpu.runs.memory import text_plans
from qlora_wgpu.runs.opening import update_plan
from qlora_wgpu.runs.samples import longest_sample
from qlora_wgpu.training.batching import sorted_by_length
from qlora_wgpu.training.preferences import Block, KLPairs, in_blocks, preference_of

# ---- what a run computes -------------------------------------------------------------------------

STEPS_LOOKED_AT = 2000  # for the lengths of their batches

Lengths = npt.NDArray[np.int64]


def answer_shapes(
    data: RunData, preference: Preference, batch_size: int, longest: int
) -> tuple[tuple[int, ...], tuple[tuple[StepKind, int], ...]]:
    """Lengths of batches whose loss is measured, and kinds and lengths of the others, in order."""
    measured: dict[int, None] = {}
    others: dict[tuple[StepKind, int], None] = {}
    for dataset in (data.train, data.held_out):
        if dataset is None:
            continue
        most = max(longest, dataset.longest)
        blocks = in_blocks(dataset, preference, batch_size)
        own = _lengths(blocks, dataset.lengths, most)
        asked = list(own) if preference.has_reference else []
        if preference.has_divergence:
            lengths = mismatched_lengths(dataset, most)
            asked += _lengths(blocks, lengths, most)
            steps = blocks if dataset is not data.train else _training_blocks(data)
            compared = _lengths(steps, lengths, most)
            others |= dict.fromkeys(("divergence", length) for length in compared)
        others |= dict.fromkeys(("sums", length) for length in asked)
        if dataset is data.held_out:
            measured |= dict.fromkeys(own)
    return tuple(measured), tuple(others)


def mismatched_lengths(dataset: Dataset, longest: int) -> Lengths:
    """Tokens of each example's prompt with another's answer; 0 where there is no example."""
    examples = KLPairs(dataset, longest)
    return np.array([len(examples[i]) for i in range(len(dataset))], np.int64)


def _training_blocks(data: RunData) -> list[Block]:
    steps = range(min(data.plan.total_steps, STEPS_LOOKED_AT))
    return [block for step in steps for block in data.plan.blocks(step)]


def _lengths(blocks: Iterable[Block], lengths: Lengths, longest: int) -> list[int]:
    found: dict[int, None] = {}
    for block in blocks:
        tokens = max(int(lengths[list(row)].sum()) for row in block)
        found[bucket_length(tokens, max(longest, tokens))] = None
    return list(found)


@dataclass(frozen=True)
class RunShapes:
    """What a run computes beside its longest step, in its order."""

    prompts: tuple[int, ...]  # tokens of the texts that are continued
    longest_sample: int  # most tokens of such a text
    held_out: tuple[int, ...]  # lengths of the batches whose loss is measured
    training: tuple[int, ...]  # lengths of the batches that are trained on, the longest first
    batch: int  # rows of a batch
    # Kinds and lengths of what else an objective over answers computes
    answers: tuple[tuple[StepKind, int], ...] = ()

    @classmethod
    def of(cls, settings: Config, data: RunData) -> RunShapes:
        """Those of a run."""
        longest = max(settings.data.max_seq_length, data.plan.longest)
        rows, held_out = settings.rows_at_once, data.held_out
        preference = preference_of(settings.train)
        measured: tuple[int, ...] = ()
        answers: tuple[tuple[StepKind, int], ...] = ()
        if preference is None and held_out is not None:
            measured = tuple(_measured_lengths(held_out, rows, longest))
        elif preference is not None:
            measured, answers = answer_shapes(data, preference, rows, longest)
        return cls(
            tuple(len(prompt.ids) for prompt in data.prompts),
            longest_sample(data.prompts),
            measured,
            tuple(_trained_lengths(data, longest)),
            rows,
            answers,
        )

    def plans(self, layout: ModelPlan, longest: StepOptions, settings: Config) -> list[Plan]:
        """The plans of all programs, in the order in which they are made ready."""
        training = [layout.step(replace(longest, seq=length)).plan for length in self.training]
        measured = TrainingOptions(objective=longest.objective)
        held_out = [
            layout.step(measured.step("loss", self.batch, length)).plan for length in self.held_out
        ]
        answers = [layout.step(measured.step(*each)).plan for each in self._answers()]
        longest_plan, texts = layout.step(longest).plan, self._texts(layout)
        if layout.adapter.forms.updates:
            first = (longest_plan, *texts, training[0], update_plan(settings, layout))
        else:
            first = (compile_plan(zeroing(layout)), longest_plan, *texts, training[0])
        plans = (*first, *answers, *held_out, *training)
        return list({id(plan): plan for plan in plans}.values())

    def _answers(self) -> Iterator[tuple[StepKind, int, int]]:
        return ((kind, self.batch, length) for kind, length in self.answers)

    def _texts(self, layout: ModelPlan) -> Iterator[Plan]:
        lengths = [max(bucket_length(each, self.longest_sample), 2) for each in self.prompts]
        sorted_by_length = [(1, tokens) for tokens in dict.fromkeys([lengths[0], 1, *lengths[1:]])]
        yield from text_plans(layout, KVCache(self.longest_sample), sorted_by_length)

    def memory(
        self,
        layout: ModelPlan,
        longest: StepOptions,
        settings: Config,
        plans: Sequence[Plan] | None = None,
    ) -> Counter[str]:
        """Bytes on the device by kind at a run's peak.

        Args:
            layout: The model.
            longest: Its longest training step.
            settings: The run's.
            plans: ``plans`` of these, where they are there already.
        """
        if plans is None:
            plans = self.plans(layout, longest, settings)
        first = list(_first(layout))  # what they leave is weights and slots
        memory = reading_memory([*first, *plans])
        memory["uniforms"] -= reading_memory(first)["uniforms"]
        if not layout.adapter.forms.updates:
            return +memory
        assert layout.stats.storage is not None
        memory["inputs"] += READ_AHEAD * layout.stats.storage.nbytes  # copies for the log
        if layout.offload.host_moments:
            moments = layout.adapter.moments
            memory["optimizer"] -= moments.nbytes
            memory["staging"] += layout.moments_passing
            parts = passing_parts(moments.piece_lengths, moments.blocks)
            memory["uniforms"] += ALIGNMENT * (parts - len(moments.piece_lengths))
        return +memory


def zeroing(layout: ModelPlan) -> Graph:
    """Zeroes the gradient, which a worker of a cluster does before each micro-batch."""
    graph = layout.new_graph()
    fill_zero(graph, layout.adapter.gradient)
    return graph


def _first(layout: ModelPlan) -> Iterator[Plan]:
    """Plans that run once, before all others, and whose parameters do not stay."""
    if layout.dequantize_plan is not None:
        yield layout.dequantize_plan
    if layout.adapter.config.use_dora:
        for name in layout.adapter.loras:
            graph, norms = norms_graph(layout, name)
            yield compile_plan(graph, (norms,))


def _measured_lengths(rows: Dataset, batch: int, longest: int) -> list[int]:
    """The lengths of batches of held-out rows, each once, in the order in which they come."""
    most = max(longest, rows.longest)
    lengths = (
        bucket_length(max(len(example) for row in chunk for example in row), most)
        for chunk in sorted_by_length(rows, batch)
    )
    return list(dict.fromkeys(lengths))


def _trained_lengths(data: RunData, longest: int) -> list[int]:
    """The same of training batches, as far as they are looked at, behind the longest's."""
    found = {bucket_length(data.plan.longest, longest): None}
    examples, steps = data.train.lengths, range(min(data.plan.total_steps, STEPS_LOOKED_AT))
    for block in (block for step in steps for block in data.plan.blocks(step)):
        found[bucket_length(max(int(examples[list(row)].sum()) for row in block), longest)] = None
    return list(found)


# ---- with a cluster ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClusterMemory:
    """Bytes that a run takes of a cluster's devices."""

    worker: int  # of each worker's, while it computes the longest step
    owner: int  # of the owner's

    @classmethod
    def of(cls, settings: Config, layout: ModelPlan, options: StepOptions) -> ClusterMemory:
        """That of a run whose longest step has these options."""
        worker = layout.changed(forms=forms_of_worker(settings))
        step = worker.memory(options, worker.sized(options).plan)
        return cls(sum(step.values()), sum(owner_memory(settings, layout).values()))


def forms_of_worker(settings: Config) -> AdapterDtypes:
    """A worker gives micro-batches' own gradients, in float32, and never updates."""
    return AdapterDtypes(settings.optim.name, updates=False)


def owner_memory(settings: Config, layout: ModelPlan) -> Counter[str]:
    """Bytes on the owner's device by kind: no base, no activations, a gradient that came."""
    layout = layout.changed(forms=layout.adapter.forms)
    layout.make_room_for_counts()  # of workers whose kernels have such a type
    graph = layout.new_graph()
    add_to(graph, layout.adapter.gradient, received_gradient(layout.adapter))
    memory = reading_memory([compile_plan(graph), update_plan(settings, layout)])
    assert layout.stats.storage is not None
    memory["inputs"] += READ_AHEAD * layout.stats.storage.nbytes  # copies for the log
    return memory


def require_owner_room(memory: Counter[str], device: Device) -> None:
    """Sees that the owner's device has room, before workers are asked for."""
    budget = device.budget if device.budget is not None else room(device)
    needed = sum(memory.values())
    if budget is not None and needed > budget:
        raise OutOfMemoryError(
            f"the owner of this run, which has the adapter, its gradients and its moments, takes "
            f"{needed / MIB:,.1f} MiB of device memory, {(needed - budget) / MIB:,.1f} MiB more "
            f"than the {budget / MIB:,.1f} MiB there are: lower lora.r, set optim.name to "
            "adamw_8bit, or raise device.memory"
        )
