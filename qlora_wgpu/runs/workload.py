"""The workload of a command: all programs that it runs on a model, as plans of a layout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

from qlora_wgpu.cluster.owner import received_gradient
from qlora_wgpu.config import Config, LoraConfig, OptimConfig, QuantConfig
from qlora_wgpu.data import Dataset, bucket_length
from qlora_wgpu.families.parts.config import longest_text
from qlora_wgpu.generation.plans import batch_sizes, bound_sequences, text_plans
from qlora_wgpu.generation.prefill import largest_batch, prompt_batches
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
from qlora_wgpu.lora.scoring_files import default_scoring
from qlora_wgpu.model.adapter_state import norms_graph
from qlora_wgpu.model.budget import reading_memory
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.steps import StepKind, StepOptions, TrainingOptions
from qlora_wgpu.model.tower_memory import planned_bytes
from qlora_wgpu.ops.kv_cache import KVCache
from qlora_wgpu.ops.loss import PLAIN, Objective
from qlora_wgpu.ops.moments import passing_parts
from qlora_wgpu.ops.tensor import add_to, fill_zero
from qlora_wgpu.training import training_options
from qlora_wgpu.training.optimizer import STEP_NUMBERS, trace_update
from qlora_wgpu.training.policies import policy_of


class Workload(ABC):
    """Programs that a command runs on a model."""

    measures = False  # whether it computes losses, whose micro-batches dequantize the weights
    generates = False  # whether it generates text, which may read copies of the weights

    @abstractmethod
    def plans(self, layout: ModelPlan) -> Sequence[Plan]:
        """The plans of all programs; those with the largest slots come first."""

    def memory(self, layout: ModelPlan, plans: Sequence[Plan]) -> Counter[str]:
        """Peak bytes on the device by kind, with these ``plans``."""
        return reading_memory(plans, layout) + Counter({"vision tower": self.tower_bytes(layout)})

    def tower_bytes(self, layout: ModelPlan) -> int:
        """Bytes of a vision tower that is on the device at the same time."""
        return 0

    def within(self, layout: ModelPlan, max_binding: int, limit: int | None) -> Workload:
        """The workload with fewer sequences at a time, if that is what it takes to fit."""
        return self


# ---- training ------------------------------------------------------------------------------------

_LARGEST_BINDING = (1 << 31) - 1  # of most cards
_VERIFIED_TEXT = 64  # tokens: shaders do not depend on the length of the text


@dataclass(frozen=True)
class DeviceSpec:
    """The GPU that a workload is planned for: an open one, or a typical one if there is none."""

    name: str = "a GPU"  # the GPU's name
    max_binding: int = _LARGEST_BINDING  # bytes of its largest binding
    profile: Profile = GPU_PROFILE  # the tiling of its kernels
    nbytes: int | None = None  # bytes of its memory, if known
    is_cpu: bool = False  # whether its memory is the host's

    @classmethod
    def of(cls, device: Device) -> DeviceSpec:
        """The properties of an open GPU."""
        nbytes = memory_size(device)
        return cls(device.name, device.max_binding, device.profile, nbytes, device.is_cpu)


@dataclass(frozen=True)
class RunShapes:
    """What a run computes in addition to its longest step, from its data, in order."""

    prompts: tuple[int, ...]  # tokens of the sample prompts
    longest_sample: int  # maximum number of tokens of a prompt with its continuation
    held_out: tuple[int, ...]  # lengths of evaluation batches
    training: tuple[int, ...]  # lengths of training batches, the longest first
    # Kinds and lengths of the other steps of DPO, ORPO and KTO
    answers: tuple[tuple[StepKind, int], ...] = ()


@dataclass(frozen=True)
class RolloutShape:
    """The generation of GRPO and RLOO."""

    prompts: tuple[int, ...]  # tokens of the prompts, without repetitions
    capacity: int  # maximum number of tokens of a prompt with its completion
    count: int  # maximum number of completions in a batch
    generations: int = 1  # completions per prompt, which is prefilled once for those of a batch

    @property
    def prompts_at_once(self) -> int:
        """Maximum number of prompts of the completions that start at the same time."""
        return min(self.count, max(self.count - 2, 0) // self.generations + 2)


@dataclass(frozen=True)
class TrainingWorkload(Workload):
    """Training: the longest step, the updates, and the other programs that its data requires."""

    pretrained: Pretrained  # the base model; weights are not needed
    step: StepOptions  # its longest step
    lora: LoraConfig = field(default_factory=LoraConfig)  # the adapter
    quant: QuantConfig = field(default_factory=QuantConfig)  # how linear layers are stored
    compute_dtype: str = "bfloat16"  # type of matmul operands
    accumulation: int = 1  # micro-batches of a step
    forms: AdapterDtypes = FLOAT32  # the types of the adapter's gradient and moments
    sides: int = 1  # rows of a micro-batch per row of the batch size: two for pairs
    optim: OptimConfig = field(default_factory=OptimConfig)
    shapes: RunShapes | None = None  # None if the data is unknown
    rollouts: RolloutShape | None = None  # None unless completions are sampled
    reward_models: int = 0  # bytes of those that score the completions

    @classmethod
    def of(
        cls, settings: Config, base: Pretrained, length: int, shapes: RunShapes | None = None,
        rollouts: RolloutShape | None = None, *, images: bool = False,
    ) -> TrainingWorkload:  # fmt: skip
        """The workload of a run whose longest row has ``length`` tokens, with images or without."""
        train, rows = settings.train, settings.rows_at_once
        options = training_options(
            train, weighted=settings.data.has_weights, policy=policy_of(settings)
        )
        if options.objective.scoring is not None:
            base = base.scored(options.objective.scoring.classes)
        step = options.step("train", rows, length, rows * length if images else 0)
        return cls(
            base, step, settings.lora, settings.quant,
            train.compute_dtype, train.gradient_accumulation_steps, AdapterDtypes.of(settings),
            rows // train.per_device_train_batch_size, settings.optim, shapes, rollouts,
        )  # fmt: skip

    @property
    def on_worker(self) -> TrainingWorkload:
        """A cluster worker's part: float32 gradients of micro-batches, without updates."""
        return replace(self, forms=AdapterDtypes(self.optim.name, updates=False))

    def layout(self, device: Device | DeviceSpec, *, keep: bool = False) -> ModelPlan:
        """The model laid out for a device; ``keep`` as for ``ModelPlan``."""
        return ModelPlan(
            self.pretrained, self.lora, self.quant, self.compute_dtype, profile=device.profile,
            max_binding=device.max_binding, forms=self.forms, keep=keep,
        )  # fmt: skip

    def plans(self, layout: ModelPlan) -> list[Plan]:
        """The plans of all programs, in the order in which they are compiled."""
        if self.shapes is None:
            return [layout.step(self.step).plan]
        shapes = self.shapes
        training = [layout.step(sized(self.step, seq=length)).plan for length in shapes.training]
        others = [
            self._other(layout, kind, length)
            for kind, length in (*shapes.answers, *(("loss", n) for n in shapes.held_out))
        ]
        first = [layout.step(self.step).plan, *self._texts(layout, shapes)]
        first += [*self.rollout_plans(layout), training[0]]
        if layout.adapter.forms.updates:
            first.append(update_plan(layout, self.optim))
        else:
            first.insert(0, compile_plan(zeroing(layout)))
        return list({id(plan): plan for plan in (*first, *others, *training)}.values())

    def _other(self, layout: ModelPlan, kind: StepKind, length: int) -> Plan:
        options = TrainingOptions(objective=self.step.objective)
        image_rows = self.step.batch * length if self.step.image_rows else 0
        return layout.step(options.step(kind, self.step.batch, length, image_rows)).plan

    def rollout_plans(self, layout: ModelPlan) -> list[Plan]:
        """The plans of GRPO's generation and log probabilities; none for other objectives."""
        given = self.rollouts
        if given is None:
            return []
        prompts = prompt_batches(given.prompts, given.capacity, given.prompts_at_once)
        sizes = [*prompts, *((rows, 1) for rows in batch_sizes(given.count))]
        cache = KVCache(given.capacity, given.count)
        policy, others = self.step.objective.policy, list[Plan]()
        if policy is not None and (policy.needs_old or policy.has_reference):
            others.append(self._other(layout, "logps", self.step.seq))
        return [*others, *text_plans(layout, cache, sizes)]

    def _texts(self, layout: ModelPlan, shapes: RunShapes) -> Iterator[Plan]:
        longest = shapes.longest_sample
        if not shapes.prompts:
            return
        first, *others = (max(bucket_length(each, longest), 2) for each in shapes.prompts)
        sizes = [(1, tokens) for tokens in dict.fromkeys([first, 1, *others])]
        yield from text_plans(layout, KVCache(longest), sizes, images=self.step.image_rows > 0)

    def memory(self, layout: ModelPlan, plans: Sequence[Plan]) -> Counter[str]:
        """Peak bytes of a run on the device by kind."""
        first = list(_first_plans(layout))  # only their weights and slots stay
        memory = reading_memory([*first, *plans])
        memory["uniforms"] -= reading_memory(first)["uniforms"]
        if layout.adapter.forms.updates:
            memory["inputs"] += _readback_bytes(layout)
        if layout.adapter.forms.updates and layout.offload.host_moments:
            moments = layout.adapter.moments
            memory["optimizer"] -= moments.nbytes
            memory["staging"] += layout.moments_passing
            parts = passing_parts(moments.piece_lengths, moments.blocks)
            memory["uniforms"] += ALIGNMENT * (parts - len(moments.piece_lengths))
        memory["reward models"] = self.reward_models
        return +memory

    def launches(self, layout: ModelPlan) -> Iterator[Launch]:
        """The launches of all kinds of programs: steps, evaluations, updates and generation."""
        preference = self.step.objective.preference
        kinds: list[StepKind] = ["loss"]
        if preference is not None and preference.has_reference:
            kinds.append("sums")
        if preference is not None and preference.has_divergence:
            kinds.append("divergence")
        if self.step.objective.policy is not None:
            kinds = ["logps"]
        plans = [] if layout.dequantize_plan is None else [layout.dequantize_plan]
        plans.append(layout.step(self.step).plan)
        plans += [self._other(layout, kind, self.step.seq) for kind in kinds]
        plans.append(update_plan(layout, self.optim))
        is_scored = self.step.objective.scoring is not None
        if not is_scored:
            plans += text_plans(layout, KVCache(_VERIFIED_TEXT), ((1, _VERIFIED_TEXT), (1, 1)))
        if not is_scored and layout.profile.textures and layout.packed_sizes.fits:
            plans += _strip_plans(layout.changed(profile=layout.profile))
        for plan in (*plans, *_norms_plans(layout)):
            yield from plan.launches


Total = Callable[..., int | None]
"""Bytes with this ``batch``, ``seq`` or ``checkpointing``; None if too many to count."""


def totals(layout: ModelPlan, step: StepOptions) -> Total:
    """All bytes of a training step of other sizes, each planned once."""
    known = cache(layout.total)
    return lambda **sizes: known(sized(step, **sizes))


def sized(step: StepOptions, **sizes: Any) -> StepOptions:
    """A step of other sizes; one with images may have them in place of all of its tokens."""
    changed = replace(step, **sizes)
    return replace(changed, image_rows=changed.batch * changed.seq if step.image_rows else 0)


def update_plan(layout: ModelPlan, optim: OptimConfig) -> Plan:
    """An update of the adapter with its moments on the device."""
    graph, storage = layout.new_graph(), Storage("step info", "inputs", 4 * STEP_NUMBERS)
    info = vector("step_info", STEP_NUMBERS, "float32", storage)
    trace_update(graph, layout.adapter, layout.stats, info, optim)
    return compile_plan(graph)


def zeroing(layout: ModelPlan) -> Graph:
    """Zeroes the gradient, as a cluster worker does before each micro-batch."""
    graph = layout.new_graph()
    fill_zero(graph, layout.adapter.gradient)
    return graph


def owner_memory(layout: ModelPlan, optim: OptimConfig) -> Counter[str]:
    """Bytes on a cluster's owner by kind: the adapter, its moments and a received gradient."""
    layout = layout.changed(forms=layout.adapter.forms)
    layout.make_room_for_counts()  # of workers whose kernels saturate
    graph = layout.new_graph()
    add_to(graph, layout.adapter.gradient, received_gradient(layout.adapter))
    memory = reading_memory([compile_plan(graph), update_plan(layout, optim)])
    memory["inputs"] += _readback_bytes(layout)
    return memory


def _readback_bytes(layout: ModelPlan) -> int:
    """Bytes of the copies from which metrics are read while later steps run."""
    assert layout.stats.storage is not None
    return READ_AHEAD * layout.stats.storage.nbytes


def _first_plans(layout: ModelPlan) -> Iterator[Plan]:
    """Plans that run once, before all others, and whose parameters are freed."""
    if layout.dequantize_plan is not None:
        yield layout.dequantize_plan
    yield from _norms_plans(layout)


def _norms_plans(layout: ModelPlan) -> Iterator[Plan]:
    for name in layout.adapter.loras if layout.adapter.config.use_dora else ():
        graph, norms = norms_graph(layout, name)
        yield compile_plan(graph, (norms,))


def _strip_plans(own: ModelPlan) -> Iterator[Plan]:
    """Plans for new tokens with packed copies of the weights, and the plan that fills these.

    ``own`` must be a layout of its own, since its copies are never filled.
    """
    yield from text_plans(own, KVCache(_VERIFIED_TEXT, packs_weights=True), ((1, 1),))
    graph = own.new_graph()
    own.packed_weights.fill(graph)
    yield compile_plan(graph)


# ---- generation and evaluation -------------------------------------------------------------------

_PROMPT, _ANSWER = 1024, 256  # default numbers of tokens


@dataclass(frozen=True)
class GenerationWorkload(Workload):
    """Text generation."""

    prompt: int  # tokens of the longest prompt
    capacity: int  # maximum number of tokens of a sequence
    count: int = 1  # maximum number of sequences in a batch
    others: tuple[LoraConfig, ...] = ()  # adapters that may be used instead of the model's own
    images: bool = False  # whether prompts may have some
    # Whether a vision tower encodes them while the model is loaded, and has its weights on the
    # device or streams them.
    tower: Literal["", "resident", "streamed"] = ""
    generates = True

    @classmethod
    def of(
        cls, base: Pretrained, prompt: int = _PROMPT, answer: int = _ANSWER, count: int = 1, *,
        images: bool = False, encoded: bool = False,
    ) -> GenerationWorkload:  # fmt: skip
        """Generation of ``answer`` tokens after ``prompt`` tokens, within the model's maximum.

        Images are encoded while the model is loaded, unless they are ``encoded`` already.
        """
        limit = longest_text(base.config) or prompt + answer
        tower: Literal["", "resident"] = "resident" if images and not encoded else ""
        return cls(
            min(prompt, limit), min(prompt + answer, limit), count, images=images, tower=tower
        )

    def tower_bytes(self, layout: ModelPlan) -> int:
        """Those of the tower for a full batch of patches."""
        return planned_bytes(layout, streamed=self.tower == "streamed") if self.tower else 0

    def within(self, layout: ModelPlan, max_binding: int, limit: int | None) -> GenerationWorkload:
        """With fewer sequences, unless weights have to be offloaded even for a single one."""
        count = bound_sequences(layout, self.capacity, self.count, max_binding)
        bound = fewer = replace(self, count=count)
        while limit is not None and fewer.memory(layout, fewer.plans(layout)).total() > limit:
            if fewer.count == 1:
                return bound
            fewer = replace(fewer, count=fewer.count // 2)
        return fewer

    def plans(self, layout: ModelPlan) -> list[Plan]:
        """Prefill of the largest prompts and decoding, with each shape of adapter."""
        prompts = largest_batch(self.prompt, self.capacity, self.count)
        sizes = [prompts, *((rows, 1) for rows in batch_sizes(self.count))]
        cache = KVCache(self.capacity, self.count)
        layouts = {layout.adapter.shape: layout}
        for other in map(layout.with_adapter, self.others):
            layouts.setdefault(other.adapter.shape, other)
        return [
            plan for each in layouts.values()
            for plan in text_plans(each, cache, sizes, images=self.images)
        ]  # fmt: skip


@dataclass(frozen=True)
class LossWorkload(Workload):
    """Evaluation of a loss."""

    count: int  # rows of a micro-batch
    length: int  # tokens of the longest row
    objective: Objective = PLAIN  # the loss
    images: bool = False  # whether rows have any
    measures = True

    @classmethod
    def of(cls, settings: Config, rows: Dataset) -> LossWorkload:
        """The evaluation of a data set."""
        longest = max(settings.data.max_seq_length, rows.longest)
        length = bucket_length(rows.longest, longest)
        objective = training_options(settings.train).objective
        return cls(settings.rows_at_once, length, objective, bool(rows.image_sources))

    @classmethod
    def of_scores(cls, base: Pretrained, count: int = 8, length: int = _PROMPT) -> LossWorkload:
        """Scores of sequences by a reward model or classifier."""
        limit = longest_text(base.config) or length
        scoring = default_scoring(base.architecture.classes)
        return cls(count, max(min(length, limit), 2), Objective(scoring=scoring))

    def plans(self, layout: ModelPlan) -> list[Plan]:
        """The longest micro-batch; shorter ones reuse its slots."""
        options = TrainingOptions(objective=self.objective)
        image_rows = self.count * self.length if self.images else 0
        return [layout.step(options.step("loss", self.count, self.length, image_rows)).plan]


class CombinedWorkload(Workload):
    """Several workloads, one after the other."""

    def __init__(self, parts: Sequence[Workload]) -> None:
        self._parts = parts
        self.measures = any(part.measures for part in parts)
        self.generates = any(part.generates for part in parts)

    def within(self, layout: ModelPlan, max_binding: int, limit: int | None) -> CombinedWorkload:
        """With fewer sequences in each part."""
        return CombinedWorkload([part.within(layout, max_binding, limit) for part in self._parts])

    def plans(self, layout: ModelPlan) -> list[Plan]:
        """The plans of all parts, those with the largest slots first."""
        plans = [plan for part in self._parts for plan in part.plans(layout)]
        return sorted(plans, key=lambda plan: -plan.activation_bytes)
