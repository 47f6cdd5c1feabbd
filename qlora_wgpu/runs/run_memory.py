"""All that a run computes, known from its data, and the device memory that it takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from qlora_wgpu.config import Config
from qlora_wgpu.data import Dataset, bucket_length
from qlora_wgpu.gpu.limits import ALIGNMENT
from qlora_wgpu.gpu.timing import READ_AHEAD
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.plan import Plan, make_plan
from qlora_wgpu.model.adapter_state import norms_graph
from qlora_wgpu.model.budget import reading_memory
from qlora_wgpu.model.model_plan import ModelLayout
from qlora_wgpu.model.steps import StepKind, StepOptions, TrainingOptions
from qlora_wgpu.ops.kv_cache import KVCache
from qlora_wgpu.ops.moments import passing_parts
from qlora_wgpu.ops.tensor import fill_zero
from qlora_wgpu.runs.answer_shapes import STEPS_LOOKED_AT, answer_shapes
from qlora_wgpu.runs.data import RunData
from qlora_wgpu.runs.samples import longest_sample
from qlora_wgpu.runs.soundness import update_plan
from qlora_wgpu.runs.text_plans import text_plans
from qlora_wgpu.training.batching import in_order
from qlora_wgpu.training.objectives import preference_of


@dataclass(frozen=True)
class RunShapes:
    """What a run computes beside its longest step, in its order.

    Attributes:
        prompts: Tokens of the texts that are continued.
        longest_sample: Most tokens of such a text.
        held_out: Lengths of the batches whose loss is measured.
        training: Lengths of the batches that are trained on, the longest first.
        batch: Rows of a batch.
        answers: Kinds and lengths of what else an objective over answers computes.
    """

    prompts: tuple[int, ...]
    longest_sample: int
    held_out: tuple[int, ...]
    training: tuple[int, ...]
    batch: int
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

    def plans(self, layout: ModelLayout, longest: StepOptions, settings: Config) -> list[Plan]:
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
            first = (make_plan(zeroing(layout)), longest_plan, *texts, training[0])
        plans = (*first, *answers, *held_out, *training)
        return list({id(plan): plan for plan in plans}.values())

    def _answers(self) -> Iterator[tuple[StepKind, int, int]]:
        return ((kind, self.batch, length) for kind, length in self.answers)

    def _texts(self, layout: ModelLayout) -> Iterator[Plan]:
        lengths = [max(bucket_length(each, self.longest_sample), 2) for each in self.prompts]
        in_order = [(1, tokens) for tokens in dict.fromkeys([lengths[0], 1, *lengths[1:]])]
        yield from text_plans(layout, KVCache(self.longest_sample), in_order)

    def memory(
        self,
        layout: ModelLayout,
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
        if layout.residency.host_moments:
            moments = layout.adapter.moments
            memory["optimizer"] -= moments.nbytes
            memory["staging"] += layout.moments_passing
            parts = passing_parts(moments.piece_lengths, moments.blocks)
            memory["uniforms"] += ALIGNMENT * (parts - len(moments.piece_lengths))
        return +memory


def zeroing(layout: ModelLayout) -> Graph:
    """Zeroes the gradient, which a worker of a cluster does before each micro-batch."""
    graph = layout.new_graph()
    fill_zero(graph, layout.adapter.gradient)
    return graph


def _first(layout: ModelLayout) -> Iterator[Plan]:
    """Plans that run once, before all others, and whose parameters do not stay."""
    if layout.filling is not None:
        yield layout.filling
    if layout.adapter.config.use_dora:
        for name in layout.adapter.loras:
            graph, norms = norms_graph(layout, name)
            yield make_plan(graph, (norms,))


def _measured_lengths(rows: Dataset, batch: int, longest: int) -> list[int]:
    """The lengths of batches of held-out rows, each once, in the order in which they come."""
    most = max(longest, rows.longest)
    lengths = (
        bucket_length(max(len(example) for row in chunk for example in row), most)
        for chunk in in_order(rows, batch)
    )
    return list(dict.fromkeys(lengths))


def _trained_lengths(data: RunData, longest: int) -> list[int]:
    """The same of training batches, as far as they are looked at, behind the longest's."""
    found = {bucket_length(data.plan.longest, longest): None}
    examples, steps = data.train.lengths, range(min(data.plan.total_steps, STEPS_LOOKED_AT))
    for block in (block for step in steps for block in data.plan.blocks(step)):
        found[bucket_length(max(int(examples[list(row)].sum()) for row in block), longest)] = None
    return list(found)
