"""A model laid out for a device without its bytes: planned first, loaded later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from qlora_wgpu.config import LoraConfig, QuantConfig
from qlora_wgpu.errors import ConfigError, OutOfMemoryError
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.kernel_config import Profile
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.host_callbacks import transfer_bytes
from qlora_wgpu.graph.offload import CheckpointPolicy, StagingBuffers
from qlora_wgpu.graph.plan import Plan, compile_plan
from qlora_wgpu.graph.tensor import ITEM_SIZE, Storage, Tensor, matrix
from qlora_wgpu.limits import VOCABULARY_TRACED
from qlora_wgpu.lora.flat_vector import FLOAT32, AdapterDtypes
from qlora_wgpu.lora.layout import AdapterLayout
from qlora_wgpu.model import derived_weights
from qlora_wgpu.model.derived_weights import kept_bytes, packed_sizes
from qlora_wgpu.model.offload_plan import RESIDENT, OffloadPlan
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.steps import (
    PlannedStep,
    StepOptions,
    head_of,
    make_sums,
    refuse_scored,
    trace_step,
    write_trained,
)
from qlora_wgpu.model.weights import WeightLayout
from qlora_wgpu.ops import moments as host_moments
from qlora_wgpu.ops.batch import BatchBuffers, make_batch_buffers
from qlora_wgpu.ops.fusion import FUSIONS
from qlora_wgpu.ops.kv_cache import CacheView, KVCache
from qlora_wgpu.ops.logits import logits_of_rows, rows_of_a_text
from qlora_wgpu.ops.quantized import PackedWeightCache
from qlora_wgpu.ops.sampling import SamplerState, choose, make_choices
from qlora_wgpu.ops.tensor import copied


@dataclass(frozen=True)
class TokenGraphs:
    """The graphs that compute and sample the next tokens of sequences."""

    batch: BatchBuffers  # the inputs of the hidden states
    next: BatchBuffers  # the inputs of sampling
    choices: SamplerState  # the sampling settings, and the sampled tokens
    hidden: Graph
    head: Graph  # logits and sampling
    kept: Tensor | None  # a copy of the logits, if requested

    @property
    def apart(self) -> bool:
        """Whether they may run while a prefill pauses: decoding, if there are other sequences."""
        cache = self.batch.cache
        return self.batch.decodes and cache is not None and cache.texts > 1


class ModelPlan:
    """Weights, adapter and sums of a model, laid out for one device profile.

    Steps are traced once for their options, before or after the weights are read; a loaded model
    replays the same plans whose memory was reported.
    """

    def __init__(
        self,
        pretrained: Pretrained,
        lora: LoraConfig,
        quant: QuantConfig,
        compute_dtype: str,
        *,
        profile: Profile,
        max_binding: int,
        offload: OffloadPlan = RESIDENT,
        forms: AdapterDtypes = FLOAT32,
        keep: bool = False,
    ) -> None:
        self.pretrained = pretrained
        self.quant = quant
        self.compute_dtype = compute_dtype
        self.profile = profile
        self.max_binding = max_binding
        self.offload = offload
        self.keep = keep  # whether streamed layers that are quantized here are cached on disk
        self._staging = StagingBuffers()
        architecture = pretrained.architecture
        if architecture.vocab_size > VOCABULARY_TRACED:
            raise OutOfMemoryError(
                f"config.json: vocab_size = {architecture.vocab_size:,} is not supported (at most "
                f"{VOCABULARY_TRACED:,})"
            )
        self.adapter = self._laid_out(lora, forms)
        std = pretrained.config.get("initializer_range")
        if isinstance(std, float) and 0 < std <= 1:
            self.adapter.head_std = std
        self.weights = WeightLayout(
            quant,
            compute_dtype,
            max_binding,
            pretrained.folder,
            weight_dtype=self.weight_dtype,
            textures=profile.textures,
            head_block=profile.head_block,
            config=pretrained.config,
            offload=offload,
            keep=keep,
        )
        self.modules = self.weights.lay_out(architecture, self.adapter)
        self.placement = self.weights.placement
        # Loss, tokens, gradient norm and update factor; and the number of values clamped to the
        # range of their type, if kernels have such a type.
        self.stats, self.saturated = make_sums(counts=profile.counts_saturated)
        self.began = ""  # how the adapter was initialized from the base, if it was
        # The packed weights that decoding reads, if its KV cache asks for them: those of all linear
        # layers, without experts, and of the head.
        weights = sum(spec.out_features * spec.in_features for spec in architecture.linears)
        head = architecture.vocab_size * self.embedded_row_bytes
        self.packed_sizes = packed_sizes(head, weights, ITEM_SIZE[self.weight_dtype])
        self.packed_weights = PackedWeightCache(dense=self.packed_sizes.dense)
        self._steps: dict[StepOptions, PlannedStep] = {}

    def changed(self, **changes: Any) -> ModelPlan:
        """The same, not loaded yet, with another profile, offload plan or element types."""
        same = {n: getattr(self, n) for n in ("profile", "max_binding", "offload", "keep")}
        given = {**same, "forms": self.adapter.forms, **changes}
        lora = self.adapter.config
        other = ModelPlan(self.pretrained, lora, self.quant, self.compute_dtype, **given)
        other.adapter.start = self.adapter.start
        return other

    def _laid_out(self, lora: LoraConfig, forms: AdapterDtypes) -> AdapterLayout:
        return AdapterLayout.of(self.pretrained.architecture, lora, forms, self.max_binding)

    def with_adapter(self, lora: LoraConfig) -> ModelPlan:
        """The same weights, loaded or not, with another adapter; steps are traced again."""
        other = copy(self)
        if self.adapter.trained_rows or lora.trainable_token_indices:
            raise ConfigError(
                "an adapter with trained rows of the embedding (lora.trainable_token_indices or "
                "model.add_tokens) cannot be loaded together with others: open it by itself"
            )
        other.adapter = other._laid_out(lora, self.adapter.forms)
        if self.adapter.trained_whole or other.adapter.trained_whole:
            raise ConfigError(
                "an adapter with a whole embedding or head (lora.modules_to_save) cannot be loaded "
                "together with others: open it by itself"
            )
        loras, of_experts = other.adapter.loras, other.adapter.expert_loras
        head = loras.get(self.pretrained.architecture.head.name)
        of_embedding = other.adapter.embedding_lora
        other.modules = self.modules.with_pairs(loras, of_experts, head, of_embedding)
        other._steps = {}
        return other

    def new_graph(
        self, staging: StagingBuffers | None = None, *, sized: bool = False, kept: bool = False
    ) -> Graph:
        staging = staging or self._staging
        if not self.offload.offload_layer_inputs:
            staging = None
        # In layers that are recomputed, rematerialization would save almost nothing.
        remakes = self.offload.remakes or (kept and self.profile.remakes)
        recomputation = CheckpointPolicy(
            self.offload.layers_per_segment, self.offload.kept_layers, staging, remakes
        )
        # Sums in textures take two of them each.
        in_buffers = self.profile.in_textures and self.offload.saves_memory
        profile = replace(self.profile, in_textures=False) if in_buffers else self.profile
        return Graph(
            self.compute_dtype, profile, self.max_binding, self.saturated, recomputation,
            rules=FUSIONS, sized=sized,
        )  # fmt: skip

    def step(self, options: StepOptions) -> PlannedStep:
        """A step's plan, traced on the first call with its options."""
        if options not in self._steps:
            graph = self.new_graph(kept=self._keeps_layers(options))
            base, modules = self.pretrained, self.modules
            self._steps[options] = trace_step(graph, base, modules, options, self.stats)
        return self._steps[options]

    def sized(self, options: StepOptions) -> PlannedStep:
        """A step for its sizes only: it is traced faster and cannot run.

        It has its own staging buffers: those of steps that run have the size of the largest.
        """
        if options in self._steps and not self.offload.offload_layer_inputs:
            return self._steps[options]
        graph = self.new_graph(StagingBuffers(), sized=True, kept=self._keeps_layers(options))
        return trace_step(graph, self.pretrained, self.modules, options, self.stats)

    def _keeps_layers(self, options: StepOptions) -> bool:
        return not options.checkpointing or self.offload.kept_layers > 0

    def total(self, options: StepOptions) -> int | None:
        """Bytes on the device of a step, by ``sized``; None if kernels cannot count them."""
        try:
            return sum(self.memory(options, self.sized(options).plan).values())
        except OutOfMemoryError:
            return None

    def logits_graphs(self, batch: BatchBuffers, samples: int = 0) -> tuple[Graph, Graph, Tensor]:
        """Graphs of a batch's hidden states, and of the logits of a few rows at a time.

        With a cache that is ``samples`` rows, by default one of each sequence.
        """
        refuse_scored(self.pretrained.architecture)
        first, second = self.new_graph(), self.new_graph()
        if batch.cache is not None:
            # No sum is split by the number of rows: a sequence does not depend on its neighbours.
            first.profile = replace(self.profile, least_workgroups=0)
        if batch.cache is not None and batch.cache.packs_weights:
            batch.cache.packed_weights = self.packed_weights
        base, modules = self.pretrained, self.modules
        if not batch.decodes:  # the prefill has written them before decoding
            write_trained(first, modules)
        config = base.architecture.config
        hidden = base.family.forward(first, config, modules, batch, checkpointing=False)
        hidden.storage = Storage("hidden states", "activations", hidden.nbytes)
        count = samples or batch.batch  # with a cache, the next token of each sequence
        if batch.cache is None:
            count = rows_of_a_text(second, modules.head, batch.rows)
        head = head_of(base.architecture, modules)
        return first, second, logits_of_rows(second, hidden, head, batch, 0, count)

    def token_graphs(
        self,
        texts: int,
        length: int,
        cache: KVCache,
        seen: Tensor,
        *,
        samples: int = 0,
        keep_logits: bool = False,
        with_images: bool = False,
    ) -> TokenGraphs:
        """Graphs of hidden states and next tokens of some of a cache's sequences.

        After a prefill, ``samples`` tokens are sampled at once, by default one of each sequence; at
        most ``texts · length``. With ``keep_logits`` there is a copy of the logits that tokens are
        sampled from. Sequences may have images only if ``with_images``.
        """
        batch = self._token_batch(texts, length, cache, with_images=with_images)
        samples = samples or texts
        following = batch if batch.decodes else make_batch_buffers(samples, 1, CacheView(cache))
        first, second, logits = self.logits_graphs(batch, samples)
        kept = copied(second, logits) if keep_logits else None
        choices = make_choices(samples, seen)
        choose(second, logits, following, choices)
        return TokenGraphs(batch, following, choices, first, second, kept)

    def _token_batch(
        self, texts: int, length: int, cache: KVCache, *, with_images: bool
    ) -> BatchBuffers:
        images = self.pretrained.architecture.images if with_images else None
        if images is None:
            return make_batch_buffers(texts, length, CacheView(cache))
        if length == 1:
            return make_batch_buffers(texts, 1, CacheView(cache), rotated=images.axes is not None)
        view, rows = CacheView(cache), texts * length
        return make_batch_buffers(texts, length, view, images=images, image_rows=rows)

    def memory(self, options: StepOptions, plan: Plan | None = None) -> Counter[str]:
        """Bytes on the device by kind while training with these options, or this plan."""
        plan = plan or self.step(options).plan
        memory = plan.bytes_by_kind()
        memory["uniforms"] = plan.uniform_bytes
        if self.adapter.forms.updates:
            moments = self.adapter.moments
            memory["optimizer"] = moments.nbytes_beside
            if self.offload.host_moments:
                memory["staging"] += self.moments_passing
            else:
                memory["optimizer"] += moments.nbytes
        if self.dequantize_plan is not None:  # the codes, which no step reads
            memory += self.dequantize_plan.storage_bytes(other=plan)
        return memory

    def host_memory(self, options: StepOptions, plan: Plan | None = None) -> Counter[str]:
        """Bytes of host memory by kind that these steps, or this plan, offload."""
        plan = plan or self.step(options).plan
        memory = self.placement.host_bytes()
        memory["layer inputs"] = plan.offloaded_bytes
        memory["transfers"] = transfer_bytes(plan)
        if self.offload.host_moments:
            moments = self.adapter.moments
            memory["optimizer"] = moments.nbytes
            count = len(moments.vectors)
            memory["transfers"] += host_moments.transfer_bytes(moments.piece_lengths, count)
        return +memory

    @cached_property
    def dequantize_plan(self) -> Plan | None:
        if not self.offload.dequantized:
            return None
        graph = self.new_graph()
        derived_weights.fill(graph, self.modules)
        return compile_plan(graph) if graph.launches else None

    def make_room_for_counts(self) -> None:
        """Makes room for the counts of clamped values that other devices send."""
        self.stats, self.saturated = make_sums(counts=True)

    def load(
        self,
        device: Device,
        progress: Callable[[str], None] = lambda name: None,
        *,
        seed: int = 0,
    ) -> None:
        """Reads and uploads the weights one after another; may be called only once."""
        if self.adapter.config.changes_base:
            self.began = self.weights.begin(self.adapter, seed, progress)
        self.placement.load(self.weights.table, device, progress)

    # -- sizes ------------------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        return self.pretrained.architecture.num_layers

    @property
    def head_options(self) -> tuple[bool, ...]:
        """The allowed values of ``streamed_head``; a head that is trained whole stays resident."""
        of = self.pretrained.architecture
        module = (of.embed_name if of.tied else of.head_name).removesuffix(".weight")
        return (False,) if module in self.adapter.trained_whole else (False, True)

    @property
    def tied(self) -> bool:
        return self.pretrained.architecture.tied

    @property
    def embedding_bytes(self) -> int:
        """Bytes of the input embedding if it may be offloaded by itself; else 0."""
        of = self.pretrained.architecture
        stays = self.tied or of.embed_name.removesuffix(".weight") in self.adapter.trained_whole
        return 0 if stays else of.vocab_size * self.embedded_row_bytes

    @property
    def embedded_row_bytes(self) -> int:
        return matrix("", 1, self.pretrained.architecture.hidden_size, self.compute_dtype).nbytes

    @property
    def moments_passing(self) -> int:
        moments = self.adapter.moments
        return host_moments.passing_bytes(moments.piece_lengths, len(moments.vectors))

    @property
    def weight_dtype(self) -> str:
        return self.profile.weight_dtype(self.compute_dtype)

    @property
    def dequantized_bytes(self) -> int:
        """Estimated bytes of quantized matrices if they were also kept dequantized.

        Streamed ones are left out; 0 if they are already kept so.
        """
        if self.offload.dequantized:
            return 0
        return kept_bytes(self.modules, self.weight_dtype)

    def weights_on_host(self) -> Counter[str]:
        memory = self.placement.host_bytes()
        memory["transfers"] = self.placement.stream.device_bytes
        return +memory
