"""What a command computes of a model: all its programs, as the plans of a layout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from qlora_wgpu.cluster.owner import received_gradient
from qlora_wgpu.config import Config, LoraConfig, OptimConfig, QuantConfig
from qlora_wgpu.data import Dataset, bucket_length
from qlora_wgpu.families.parts.config import longest_text
from qlora_wgpu.generation.engine import batch_sizes
from qlora_wgpu.generation.prefill import largest_batch
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.kernel_config import GPU_PROFILE, Profile
from qlora_wgpu.gpu.limits import ALIGNMENT
from qlora_wgpu.gpu.memory import memory_size
from qlora_wgpu.gpu.timing import READ_AHEAD
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.launch import Launch
from qlora_wgpu.graph.plan import Plan, compile_plan
from qlora_wgpu.graph.tensor import Storage, vector
from qlora_wgpu.lora.flat_vector import FLOAT32, AdapterDtypes
from qlora_wgpu.model.adapter_state import norms_graph
from qlora_wgpu.model.budget import reading_memory
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.steps import StepKind, StepOptions, TrainingOptions
from qlora_wgpu.ops.kv_cache import KVCache
from qlora_wgpu.ops.loss import PLAIN, Objective
from qlora_wgpu.ops.moments import passing_parts
from qlora_wgpu.ops.sampling import make_seen
from qlora_wgpu.ops.tensor import add_to, fill_zero
from qlora_wgpu.training import training_options
from qlora_wgpu.training.optimizer import STEP_NUMBERS, trace_update


class Workload(ABC):
    """Something that is computed of a model."""

    measures = False  # whether rows are measured, whose micro-batches dequantize the weights
    writes = False  # whether texts are, which may read copies of the weights

    @abstractmethod
    def plans(self, layout: ModelPlan) -> Sequence[Plan]:
        """Plans of all of it; those with the largest slots come first."""

    def memory(self, layout: ModelPlan, plans: Sequence[Plan]) -> Counter[str]:
        """Bytes on the device by kind at the peak, of these ``plans``."""
        return reading_memory(plans, layout)


# ---- training ------------------------------------------------------------------------------------

_LARGEST_BINDING = (1 << 31) - 1  # what most cards allow
_VERIFIED_TEXT = 64  # tokens: the shaders of a text do not depend on its length


@dataclass(frozen=True)
class DeviceSpec:
    """For what a training is planned: an open GPU, or a common one where none is there."""

    name: str = "a GPU"  # the GPU's name
    max_binding: int = _LARGEST_BINDING  # bytes of its largest binding
    profile: Profile = GPU_PROFILE  # how kernels are cut for it
    nbytes: int | None = None  # bytes of its memory, where they are known
    is_cpu: bool = False  # whether its memory is the host's

    @classmethod
    def of(cls, device: Device) -> DeviceSpec:
        """An open GPU."""
        nbytes = memory_size(device)
        return cls(device.name, device.max_binding, device.profile, nbytes, device.is_cpu)


@dataclass(frozen=True)
class RunShapes:
    """What a run computes beside its longest step, by its data, in the order of the run."""

    prompts: tuple[int, ...]  # tokens of the texts that are continued
    longest_sample: int  # most tokens of such a text
    held_out: tuple[int, ...]  # lengths of the batches whose loss is measured
    training: tuple[int, ...]  # lengths of the batches that are trained on, the longest first
    # Kinds and lengths of what else an objective over answers computes
    answers: tuple[tuple[StepKind, int], ...] = ()


@dataclass(frozen=True)
class TrainingWorkload(Workload):
    """A training: its longest step, the updates, and what its data makes it compute beside."""

    pretrained: Pretrained  # the base model, of which config.json is known
    step: StepOptions  # its longest step
    lora: LoraConfig = field(default_factory=LoraConfig)  # the adapter
    quant: QuantConfig = field(default_factory=QuantConfig)  # how linear layers are stored
    compute_dtype: str = "bfloat16"  # type of matmul operands
    accumulation: int = 1  # micro-batches of a step
    forms: AdapterDtypes = FLOAT32  # in which types the adapter's gradient and moments are kept
    sides: int = 1  # rows of a micro-batch for each that the settings count: two of a pair
    optim: OptimConfig = field(default_factory=OptimConfig)
    shapes: RunShapes | None = None  # None where the data is not known

    @classmethod
    def of(
        cls, settings: Config, base: Pretrained, length: int, shapes: RunShapes | None = None
    ) -> TrainingWorkload:
        """A run's, whose longest row has so many tokens."""
        train, rows = settings.train, settings.rows_at_once
        options = training_options(train, weighted=settings.data.has_weights)
        return cls(
            base, options.step("train", rows, length), settings.lora, settings.quant,
            train.compute_dtype, train.gradient_accumulation_steps, AdapterDtypes.of(settings),
            rows // train.per_device_train_batch_size, settings.optim, shapes,
        )  # fmt: skip

    @property
    def batch(self) -> int:
        """Rows of a micro-batch."""
        return self.step.batch

    @property
    def seq(self) -> int:
        """Tokens of a row."""
        return self.step.seq

    @property
    def checkpointing(self) -> bool:
        """Whether layers are recomputed in the backward."""
        return self.step.checkpointing

    @property
    def on_worker(self) -> TrainingWorkload:
        """A cluster worker's, which gives float32 gradients of micro-batches and never updates."""
        return replace(self, forms=AdapterDtypes(self.optim.name, updates=False))

    def layout(self, device: Device | DeviceSpec, *, keep: bool = False) -> ModelPlan:
        """The model laid out for a device; ``keep`` as for ``ModelPlan``."""
        return ModelPlan(
            self.pretrained, self.lora, self.quant, self.compute_dtype, profile=device.profile,
            max_binding=device.max_binding, forms=self.forms, keep=keep,
        )  # fmt: skip

    def plans(self, layout: ModelPlan) -> list[Plan]:
        """The plans of all programs, in the order in which they are made ready."""
        if self.shapes is None:
            return [layout.step(self.step).plan]
        shapes = self.shapes
        training = [layout.step(replace(self.step, seq=length)).plan for length in shapes.training]
        others = [
            self._other(layout, kind, length)
            for kind, length in (*shapes.answers, *(("loss", n) for n in shapes.held_out))
        ]
        first = [layout.step(self.step).plan, *self._texts(layout, shapes), training[0]]
        if layout.adapter.forms.updates:
            first.append(update_plan(layout, self.optim))
        else:
            first.insert(0, compile_plan(zeroing(layout)))
        return list({id(plan): plan for plan in (*first, *others, *training)}.values())

    def _other(self, layout: ModelPlan, kind: StepKind, length: int) -> Plan:
        """A step without a gradient."""
        options = TrainingOptions(objective=self.step.objective)
        return layout.step(options.step(kind, self.step.batch, length)).plan

    def _texts(self, layout: ModelPlan, shapes: RunShapes) -> Iterator[Plan]:
        most = shapes.longest_sample
        first, *others = (max(bucket_length(each, most), 2) for each in shapes.prompts)
        sizes = [(1, tokens) for tokens in dict.fromkeys([first, 1, *others])]
        yield from text_plans(layout, KVCache(most), sizes)

    def memory(self, layout: ModelPlan, plans: Sequence[Plan]) -> Counter[str]:
        """Bytes on the device by kind at a run's peak."""
        first = list(_first_plans(layout))  # what they leave is weights and slots
        memory = reading_memory([*first, *plans])
        memory["uniforms"] -= reading_memory(first)["uniforms"]
        if layout.adapter.forms.updates:
            memory["inputs"] += _sums_for_the_log(layout)
        if layout.adapter.forms.updates and layout.offload.host_moments:
            moments = layout.adapter.moments
            memory["optimizer"] -= moments.nbytes
            memory["staging"] += layout.moments_passing
            parts = passing_parts(moments.piece_lengths, moments.blocks)
            memory["uniforms"] += ALIGNMENT * (parts - len(moments.piece_lengths))
        return +memory

    def launches(self, layout: ModelPlan) -> Iterator[Launch]:
        """Launches of all kinds of programs: steps, evaluations, updates and texts."""
        preference = self.step.objective.preference
        kinds: list[StepKind] = ["loss"]
        if preference is not None and preference.has_reference:
            kinds.append("sums")
        if preference is not None and preference.has_divergence:
            kinds.append("divergence")
        plans = [] if layout.dequantize_plan is None else [layout.dequantize_plan]
        plans.append(layout.step(self.step).plan)
        plans += [self._other(layout, kind, self.step.seq) for kind in kinds]
        plans.append(update_plan(layout, self.optim))
        plans += text_plans(layout, KVCache(_VERIFIED_TEXT), ((1, _VERIFIED_TEXT), (1, 1)))
        if layout.profile.textures and layout.packed_sizes.fits:
            plans += _strip_plans(layout.changed(profile=layout.profile))
        for plan in (*plans, *_norms_plans(layout)):
            yield from plan.launches


Total = Callable[..., int | None]
"""Bytes with this ``batch``, ``seq`` or ``checkpointing``; None if beyond counting."""


def totals(layout: ModelPlan, step: StepOptions) -> Total:
    """All bytes of a training step in other sizes, each planned once."""
    known = cache(layout.total)
    return lambda **sizes: known(replace(step, **sizes))


def update_plan(layout: ModelPlan, optim: OptimConfig) -> Plan:
    """An update of the adapter with its moments on the device."""
    graph, storage = layout.new_graph(), Storage("step info", "inputs", 4 * STEP_NUMBERS)
    info = vector("step_info", STEP_NUMBERS, "float32", storage)
    trace_update(graph, layout.adapter, layout.stats, info, optim)
    return compile_plan(graph)


def zeroing(layout: ModelPlan) -> Graph:
    """Zeroes the gradient, which a worker of a cluster does before each micro-batch."""
    graph = layout.new_graph()
    fill_zero(graph, layout.adapter.gradient)
    return graph


def owner_memory(layout: ModelPlan, optim: OptimConfig) -> Counter[str]:
    """Bytes on a cluster's owner by kind: no base, no activations, a gradient that came."""
    layout = layout.changed(forms=layout.adapter.forms)
    layout.make_room_for_counts()  # of workers whose kernels have such a type
    graph = layout.new_graph()
    add_to(graph, layout.adapter.gradient, received_gradient(layout.adapter))
    memory = reading_memory([compile_plan(graph), update_plan(layout, optim)])
    memory["inputs"] += _sums_for_the_log(layout)
    return memory


def _sums_for_the_log(layout: ModelPlan) -> int:
    """Bytes of the copies that are read for the log while later steps run."""
    assert layout.stats.storage is not None
    return READ_AHEAD * layout.stats.storage.nbytes


def _first_plans(layout: ModelPlan) -> Iterator[Plan]:
    """Plans that run once, before all others, and whose parameters do not stay."""
    if layout.dequantize_plan is not None:
        yield layout.dequantize_plan
    yield from _norms_plans(layout)


def _norms_plans(layout: ModelPlan) -> Iterator[Plan]:
    """Those of DoRA's magnitudes."""
    for name in layout.adapter.loras if layout.adapter.config.use_dora else ():
        graph, norms = norms_graph(layout, name)
        yield compile_plan(graph, (norms,))


def _strip_plans(own: ModelPlan) -> Iterator[Plan]:
    """New tokens with copies of the weights, and what fills those.

    The layout is one of its own: what the plans ask of its copies is never filled.
    """
    yield from text_plans(own, KVCache(_VERIFIED_TEXT, packs_weights=True), ((1, 1),))
    graph = own.new_graph()
    own.packed_weights.fill(graph)
    yield compile_plan(graph)


# ---- what is computed without a gradient ---------------------------------------------------------

_PROMPT, _ANSWER = 1024, 256  # tokens, where nobody says how many


@dataclass(frozen=True)
class GenerationWorkload(Workload):
    """Texts that grow."""

    prompt: int  # tokens of the longest prompt
    capacity: int  # most tokens of a text
    count: int = 1  # how many grow at a time
    others: tuple[LoraConfig, ...] = ()  # adapters that they may have instead of the model's own
    writes = True

    @classmethod
    def of(
        cls, base: Pretrained, prompt: int = _PROMPT, answer: int = _ANSWER, count: int = 1
    ) -> GenerationWorkload:
        """Texts of so many tokens, at most as many as a model takes."""
        limit = longest_text(base.config) or prompt + answer
        return cls(min(prompt, limit), min(prompt + answer, limit), count)

    def plans(self, layout: ModelPlan) -> list[Plan]:
        """The largest prompts, and a token after them, with each shape of adapter."""
        prompts = largest_batch(self.prompt, self.capacity, self.count)
        sizes = [prompts, *((rows, 1) for rows in batch_sizes(self.count))]
        cache = KVCache(self.capacity, self.count)
        layouts = {layout.adapter.shape: layout}
        for other in map(layout.with_adapter, self.others):
            layouts.setdefault(other.adapter.shape, other)
        return [plan for each in layouts.values() for plan in text_plans(each, cache, sizes)]


@dataclass(frozen=True)
class LossWorkload(Workload):
    """Rows whose loss is measured."""

    count: int  # rows of a micro-batch
    length: int  # tokens of the longest
    objective: Objective = PLAIN  # what is measured
    measures = True

    @classmethod
    def of(cls, settings: Config, rows: Dataset) -> LossWorkload:
        """A data set's."""
        longest = max(settings.data.max_seq_length, rows.longest)
        length = bucket_length(rows.longest, longest)
        return cls(settings.rows_at_once, length, training_options(settings.train).objective)

    def plans(self, layout: ModelPlan) -> list[Plan]:
        """The longest micro-batch; shorter ones take its slots."""
        options = TrainingOptions(objective=self.objective)
        return [layout.step(options.step("loss", self.count, self.length)).plan]


class CombinedWorkload(Workload):
    """Several of them, one after the other."""

    def __init__(self, parts: Sequence[Workload]) -> None:
        self._parts = parts
        self.measures = any(part.measures for part in parts)
        self.writes = any(part.writes for part in parts)

    def plans(self, layout: ModelPlan) -> list[Plan]:
        """All their plans, those with the largest slots first."""
        plans = [plan for part in self._parts for plan in part.plans(layout)]
        return sorted(plans, key=lambda plan: -plan.activation_bytes)


def text_plans(
    layout: ModelPlan, cache: KVCache, sizes: Iterable[tuple[int, int]]
) -> Iterator[Plan]:
    """The plans of an engine's programs, two of each, in the order in which they are made ready."""
    seen = make_seen(cache.texts, layout.pretrained.architecture.vocab_size)
    for texts, tokens in sizes:
        graphs = layout.token_graphs(texts, tokens, cache, seen)
        yield compile_plan(graphs.hidden, apart=graphs.apart)
        yield compile_plan(graphs.head, apart=graphs.apart)
