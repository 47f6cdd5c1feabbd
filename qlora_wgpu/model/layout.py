"""A model laid out for a device, without its bytes: what is planned, and later loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import cached_property

from qlora_wgpu.config import LoraConfig, QuantConfig
from qlora_wgpu.errors import ConfigError, OutOfMemoryError
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.profile import Profile
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.parking import Parking, Recomputation
from qlora_wgpu.graph.plan import Plan, make_plan
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.limits import VOCABULARY_TRACED
from qlora_wgpu.lora.forms import FLOAT32, AdapterForms
from qlora_wgpu.lora.layout import Adapter
from qlora_wgpu.lora.tokens import Vocabulary
from qlora_wgpu.model import kept_weights
from qlora_wgpu.model.layout_memory import LayoutMemory
from qlora_wgpu.model.network import Network
from qlora_wgpu.model.options import StepOptions
from qlora_wgpu.model.planned_step import PlannedStep, make_sums, trace_step
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.residency import RESIDENT, Residency
from qlora_wgpu.model.token_graphs import TokenGraphs
from qlora_wgpu.model.weights import WeightLayout
from qlora_wgpu.ops.batch import BatchBuffers, make_batch_buffers
from qlora_wgpu.ops.fusion import FUSIONS
from qlora_wgpu.ops.kv_cache import CacheView, KVCache
from qlora_wgpu.ops.sampling import choose, make_choices
from qlora_wgpu.ops.strips import StripStore
from qlora_wgpu.ops.tensor import copied


class ModelLayout(LayoutMemory):
    """Weights, adapter and sums of a model as kernels see them, cut for one device profile.

    Steps are traced once for their options, before or after the weights are read; the model that
    is loaded from a layout replays the very plans whose memory was told.

    Attributes:
        pretrained: The base.
        quant: How its linear layers are stored.
        compute_dtype: Element type of matmul operands.
        profile: How kernels are cut.
        max_binding: Largest number of bytes that one binding may show.
        residency: What waits in host memory.
        keep: Whether layers that come and go, and are quantized here, are kept on disk.
        adapter: The layout of the adapter's parameters.
        network: The network that is traced.
        stats: Sums of loss and tokens, gradient norm, update factor.
        saturated: Behind them, how many values were held at the end of their type, where kernels
            have such a type.
        strips: Copies of the weights that new tokens read, where their cache asks for it.
        copy_sizes: What they take, once all are made.
        began: How the adapter's start was found in the base, if it was.
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
        residency: Residency = RESIDENT,
        forms: AdapterForms = FLOAT32,
        keep: bool = False,
    ) -> None:
        """Lays everything out; no weight is read.

        Args:
            pretrained: The base.
            lora: The adapter.
            quant: How the base's linear layers are stored.
            compute_dtype: ``"bfloat16"`` or ``"float32"``.
            profile: How kernels are cut for the device.
            max_binding: The device's limit.
            residency: What waits in host memory.
            forms: In which types the adapter's gradient and moments are kept.
            keep: Whether layers that come and go, and are quantized here, are kept on disk.

        Raises:
            CheckpointError: If the files lack a tensor or hold one that config.json denies.
            ConfigError: If the adapter does not fit the model.
            OutOfMemoryError: If the vocabulary is far larger than any.
        """
        self.pretrained = pretrained
        self.quant = quant
        self.compute_dtype = compute_dtype
        self.profile = profile
        self.max_binding = max_binding
        self.residency = residency
        self.keep = keep
        self._parking = Parking()
        architecture = pretrained.architecture
        if architecture.vocab_size > VOCABULARY_TRACED:
            raise OutOfMemoryError(
                f"config.json: logits of a vocabulary of {architecture.vocab_size:,} are not "
                f"planned, only of {VOCABULARY_TRACED:,}"
            )
        self.adapter = self._laid_out(lora, forms)
        self._weights = WeightLayout(
            quant,
            compute_dtype,
            max_binding,
            pretrained.folder,
            weight_dtype=self.weight_dtype,
            textures=profile.textures,
            head_block=profile.head_block,
            config=pretrained.config,
            residency=residency,
            keep=keep,
        )
        modules = self._weights.lay_out(architecture, self.adapter)
        self.network = Network(pretrained.family, architecture, modules)
        self.stats, self.saturated = make_sums(counts=profile.counts_saturated)
        self.began = ""
        self.copy_sizes = self.sizes_of_copies()
        self.strips = StripStore(dense=self.copy_sizes.dense)
        self._steps: dict[StepOptions, PlannedStep] = {}

    def cut_for(self, profile: Profile) -> ModelLayout:
        """The same model, of which nothing is loaded yet, for another profile."""
        return self._again(profile, self.residency)

    def waiting(self, residency: Residency) -> ModelLayout:
        """The same model, of which nothing is loaded yet, with what waits in host memory."""
        return self._again(self.profile, residency)

    def with_forms(self, forms: AdapterForms) -> ModelLayout:
        """The same model, of which nothing is loaded yet, with an adapter in other types."""
        return self._again(self.profile, self.residency, forms)

    def _again(
        self, profile: Profile, residency: Residency, forms: AdapterForms | None = None
    ) -> ModelLayout:
        other = ModelLayout(
            self.pretrained,
            self.adapter.config,
            self.quant,
            self.compute_dtype,
            profile=profile,
            max_binding=self.max_binding,
            residency=residency,
            forms=forms or self.adapter.forms,
            keep=self.keep,
        )
        other.adapter.start = self.adapter.start
        return other

    def _laid_out(self, lora: LoraConfig, forms: AdapterForms) -> Adapter:
        of = self.pretrained.architecture
        within = of.adapted_within
        tokens = Vocabulary.of(of)
        return Adapter(lora, of.linears, of.experts, forms, self.max_binding, within, tokens)

    def with_adapter(self, lora: LoraConfig) -> ModelLayout:
        """The same weights, loaded or not, with another adapter; steps are traced anew.

        Raises:
            ConfigError: If the adapter does not fit the model.
        """
        other = copy(self)
        if self.adapter.trained_rows or lora.trainable_token_indices:
            raise ConfigError(
                "an adapter with trained rows of the embedding (lora.trainable_token_indices or "
                "model.add_tokens) stands alone on its base: open it by itself"
            )
        other.adapter = other._laid_out(lora, self.adapter.forms)
        if self.adapter.trained_whole or other.adapter.trained_whole:
            raise ConfigError(
                "an adapter with a whole embedding or head (lora.modules_to_save) stands alone on "
                "its base: open it by itself"
            )
        loras, of_experts = other.adapter.loras, other.adapter.expert_loras
        head = loras.get(self.pretrained.architecture.head.name)
        of_embedding = other.adapter.embedding_lora
        modules = self.network.modules.with_pairs(loras, of_experts, head, of_embedding)
        other.network = replace(self.network, modules=modules)
        other._steps = {}
        return other

    def new_graph(self, *, sized: bool = False, kept: bool = False) -> Graph:
        """An empty graph for this element type and profile.

        Args:
            sized: As for ``Graph``.
            kept: Whether it is of a step that keeps layers for the backward. Of those that are
                recomputed what is made again would save next to nothing.
        """
        parking = self._parking if self.residency.parked_inputs else None
        remakes = self.residency.remakes or (kept and self.profile.remakes)
        recomputation = Recomputation(
            self.residency.layers_together, self.residency.kept_layers, parking, remakes
        )
        # Sums in textures take two of them.
        saves = self.profile.in_textures and self.residency.waits
        profile = replace(self.profile, in_textures=False) if saves else self.profile
        return Graph(
            self.compute_dtype, profile, self.max_binding, self.saturated, recomputation,
            rules=FUSIONS, sized=sized,
        )  # fmt: skip

    def step(self, options: StepOptions) -> PlannedStep:
        """A step's plan, traced the first time that its options are asked for.

        Raises:
            OutOfMemoryError: If a tensor has more elements than kernels can count.
        """
        if options not in self._steps:
            self._steps[options] = self._traced(options)
        return self._steps[options]

    def sized(self, options: StepOptions) -> PlannedStep:
        """A step for its sizes alone, which is traced faster; whatever was traced before.

        It may not run. Steps that do share what layers' inputs pass through, which has the size of
        the largest.

        Raises:
            OutOfMemoryError: If a tensor has more elements than kernels can count.
        """
        if options in self._steps and not self.residency.parked_inputs:
            return self._steps[options]
        parking, self._parking = self._parking, Parking()
        try:
            return self._traced(options, sized=True)
        finally:
            self._parking = parking

    def _traced(self, options: StepOptions, *, sized: bool = False) -> PlannedStep:
        kept = not options.checkpointing or self.residency.kept_layers > 0
        graph = self.new_graph(sized=sized, kept=kept)
        return trace_step(graph, self.network, options, self.stats)

    def total(self, options: StepOptions) -> int | None:
        """Bytes on the device of a step, by ``sized``; None where kernels cannot count them."""
        try:
            return sum(self.memory(options, self.sized(options).plan).values())
        except OutOfMemoryError:
            return None

    def logits_graphs(self, batch: BatchBuffers) -> tuple[Graph, Graph, Tensor]:
        """The hidden states of a batch, and from them the logits of a few rows at a time."""
        first, second = self.new_graph(), self.new_graph()
        if batch.cache is not None:
            # No sum is cut by the number of rows: a text does not depend on those beside it.
            first.profile = replace(self.profile, least_workgroups=0)
        if batch.cache is not None and batch.cache.in_strips:
            batch.cache.strips = self.strips
        hidden = self.network.trace_hidden(first, batch)
        return first, second, self.network.trace_logits(second, hidden, batch)

    def token_graphs(
        self, texts: int, length: int, cache: KVCache, seen: Tensor, *, told: bool = False
    ) -> TokenGraphs:
        """The hidden states of some of a cache's texts, and from them their next tokens.

        Beside them a copy of the logits that the choice begins with, if they are to be ``told``.
        """
        batch = make_batch_buffers(texts, length, CacheView(cache))
        # Prompts are chosen after as new tokens are, by a token of each.
        following = batch if batch.decodes else make_batch_buffers(texts, 1, CacheView(cache))
        first, second, logits = self.logits_graphs(batch)
        kept = copied(second, logits) if told else None
        choices = make_choices(texts, seen)
        choose(second, logits, following, choices)
        return TokenGraphs(batch, following, choices, first, second, kept)

    def memory(self, options: StepOptions, plan: Plan | None = None) -> Counter[str]:
        """Bytes on the device by kind while steps with these options, or this plan, train."""
        plan = plan or self.step(options).plan
        memory = self.device_memory(plan)
        if self.filling is not None:  # codes of which no step needs to know
            memory += self.filling.storage_bytes(beside=plan)
        return memory

    def host_memory(self, options: StepOptions, plan: Plan | None = None) -> Counter[str]:
        """Bytes of host memory by kind that wait while they do."""
        return self.waiting_memory(plan or self.step(options).plan)

    @cached_property
    def filling(self) -> Plan | None:
        """What makes the weights that are kept dequantized, once, before anything else runs."""
        if not self.residency.dequantized:
            return None
        graph = self.new_graph()
        kept_weights.fill(graph, self.network.modules)
        return make_plan(graph) if graph.launches else None

    @property
    def problem(self) -> str:
        """Why layers are not kept on disk, where they should be; else empty."""
        return self._weights.places.problem

    def make_room_for_counts(self) -> None:
        """Gives the sums room for what other devices count, whose kernels have such a type."""
        self.stats, self.saturated = make_sums(counts=True)

    def load(
        self,
        device: Device,
        progress: Callable[[str], None] = lambda name: None,
        *,
        seed: int = 0,
    ) -> None:
        """Reads the weights and uploads them, one after another; to be called once.

        Args:
            device: One with this profile.
            progress: Called with each tensor's name before it is read.
            seed: Of the start of an adapter that is a part of the base, where it has none yet.

        Raises:
            CheckpointError: If a tensor is missing, damaged or of another shape.
            OutOfMemoryError: If the device has no room.
        """
        if self.adapter.config.changes_base:
            self.began = self._weights.begin(self.adapter, seed, progress)
        self._weights.load(device, progress)
