"""A decoder composed of norm, attention, MLP and residual order.

Each part lists its weights and traces itself. A family's file reads config.json into a ``Decoder``;
one that does not fit writes its own forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from qlora_wgpu.families.family import Architecture, BalanceLoss, Modules, Weights
from qlora_wgpu.families.parts.attention import Attention
from qlora_wgpu.families.parts.config import ConfigReader, Dimensions, check_sizes, padding_idx
from qlora_wgpu.families.parts.latent_attention import LatentAttention
from qlora_wgpu.families.parts.layer_ops import LayerOps, State
from qlora_wgpu.families.parts.mamba import Mamba, ParallelMixers
from qlora_wgpu.families.parts.mixers import GatedDeltaNet, ShortConv
from qlora_wgpu.families.parts.norm import Norm
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.batch import BatchBuffers, ImageLayout


@dataclass(frozen=True)
class ResidualOrder:
    """The names of a layer's norms; None if there is none at that place."""

    before_attention: str | None = None  # the norm of attention's input
    # The norm of attention's output, before the residual addition.
    after_attention: str | None = None
    before_mlp: str | None = None  # the norm of the MLP's input
    after_mlp: str | None = None  # the norm of the MLP's output
    # Whether attention and MLP both read the layer's input, each by its own norm, or both by
    # ``before_attention`` if the MLP has none.
    parallel: bool = False

    @property
    def names(self) -> list[str]:
        norms = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
        return [name for name in norms if name is not None]


PRE_NORM = ResidualOrder(
    before_attention="input_layernorm",
    before_mlp="post_attention_layernorm",
)
POST_NORM = ResidualOrder(
    after_attention="post_attention_layernorm",
    after_mlp="post_feedforward_layernorm",
)
PRE_AND_POST_NORM = ResidualOrder(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
PARALLEL = ResidualOrder(before_attention="input_layernorm", parallel=True)
STREAM = "h"
"""The residual stream in the state that layers pass on."""


class Half(Protocol):
    """Half of a layer: attention or an MLP."""

    def weights(self, at: str) -> Weights:
        """The weights in the layer whose prefix is ``at``."""

    def trace(
        self, ops: LayerOps, x: Tensor, at: str, residual: Tensor | None, scale: float
    ) -> Tensor:
        """Adds scale times the output for x to the residual, or returns only that in float32."""


Mixer = Attention | LatentAttention | ShortConv | GatedDeltaNet | Mamba | ParallelMixers


@dataclass(frozen=True)
class Layer:
    """One layer of a decoder: attention and an MLP, or one of them."""

    norm: Norm  # the kind of all the layer's norms
    attention: Mixer | None  # attention, or what replaces it
    mlp: Half | None
    order: ResidualOrder = PRE_NORM  # the places of the norms
    residual_scale: float = 1.0  # factor of each half's output
    post_norm: Norm | None = None  # the norm of each half's output, if it differs from ``norm``

    def weights(self, at: str, hidden_size: int) -> Weights:
        weights = Weights()
        for half in (self.attention, self.mlp):
            if half is not None:
                weights += half.weights(at)
        for name in self.order.names:
            weights += self.norm.weights(at + name, hidden_size)
        return weights

    def trace(self, ops: LayerOps, state: State, i: int, at: str) -> State:
        """The state after the i-th layer, whose prefix is ``at``."""
        order, h = self.order, state[STREAM]
        of_mlp = None
        if self.attention is not None:
            x = self._before(ops, h, at, order.before_attention)
            if order.parallel:
                name = order.before_mlp
                of_mlp = x if name is None else self._before(ops, h, at, name)
            h = self._added(ops, self.attention, x, h, at, order.after_attention)
        if self.mlp is not None:
            if of_mlp is None:
                of_mlp = self._before(ops, h, at, order.before_mlp)
            h = self._added(ops, self.mlp, of_mlp, h, at, order.after_mlp)
        return {**state, STREAM: h}

    def _added(
        self, ops: LayerOps, half: Half, x: Tensor, h: Tensor, at: str, after: str | None
    ) -> Tensor:
        """h plus the half's output for x, which passes the norm ``after`` if there is one."""
        residual = h if after is None else None
        made = half.trace(ops, x, at, residual, self.residual_scale)
        return self._after(ops, made, h, at, after)

    def _before(self, ops: LayerOps, h: Tensor, at: str, name: str | None) -> Tensor:
        return ops.operand(h) if name is None else self.norm.trace(ops, h, at + name)

    def _after(self, ops: LayerOps, made: Tensor, h: Tensor, at: str, name: str | None) -> Tensor:
        norm = self.post_norm or self.norm
        return made if name is None else norm.trace(ops, made, at + name, residual=h)


@dataclass(frozen=True)
class Decoder:
    """A whole model up to its final norm, and the scale, softcap and bias of its logits."""

    dimensions: Dimensions  # the model's sizes
    norm: Norm  # the final one
    layers: tuple[Layer, ...]  # from the first to the last
    tied: bool  # whether the head is the embedding
    # Hugging Face's default of ``pad_token_id``, if there is one: see ``padding_idx``.
    pad_token_id: int | None = None
    prefix: str = "model."  # prefix of its modules
    stored_prefixes: tuple[tuple[str, str], ...] = (("model.", ""),)  # see ``Architecture``
    embedding_scale: float = 1.0  # factor of the embedding
    # The epsilon of a norm of the embedding, without a weight; None without a norm.
    embedding_norm: float | None = None
    # Whether that norm is a part of the embedding's module, before what NEFTune and adapters add.
    norms_within: bool = False
    # Factor of NEFTune's noise, which Hugging Face adds to the embedding module's output: a factor
    # that the model applies later also applies to the noise.
    noise_scale: float = 1.0
    logit_scale: float = 1.0  # factor of the head's product
    logit_softcap: float | None = None  # bound of the logits, if any
    notes: tuple[str, ...] = ()  # see ``Architecture``
    embedding: str = "embed_tokens"  # the embedding's module, within ``prefix``
    final_norm: str = "norm"  # the final norm's module, within ``prefix``
    head_bias: bool = False  # whether the logits have a bias
    # Whether the embedding's row of ``pad_token_id`` gets no gradient.
    pads: bool = True
    adapted_within: str = ""  # see ``Architecture``
    balance: BalanceLoss | None = None  # see ``Architecture``
    images: ImageLayout | None = None  # see ``Architecture``
    media_ids: tuple[range, ...] = ()  # see ``Architecture``

    def weights(self) -> Weights:
        """All weights except the embedding and the head."""
        weights = Weights()
        for i, layer in enumerate(self.layers):
            weights += layer.weights(self._at(i), self.dimensions.hidden_size)
        name = f"{self.prefix}{self.final_norm}"
        return weights + self.norm.weights(name, self.dimensions.hidden_size)

    def architecture(self) -> Architecture:
        weights = self.weights()
        check_sizes(weights, self.dimensions.vocab_size * self.dimensions.hidden_size)
        head_bias = "lm_head.bias" if self.head_bias else ""
        if head_bias:
            weights += Weights(norms={head_bias: self.dimensions.vocab_size})
        return Architecture(
            **vars(weights),
            config=self,
            vocab_size=self.dimensions.vocab_size,
            hidden_size=self.dimensions.hidden_size,
            num_layers=len(self.layers),
            tied=self.tied,
            embed_name=f"{self.prefix}{self.embedding}.weight",
            stored_prefixes=self.stored_prefixes,
            norm_offset=self.norm.offset,
            logit_scale=self.logit_scale,
            logit_softcap=self.logit_softcap,
            notes=self.notes,
            adapted_within=self.adapted_within,
            balance=self.balance,
            head_bias=head_bias,
            images=self.images,
            media_ids=self.media_ids,
        )

    def trace(self, ops: LayerOps, *, checkpointing: bool) -> Tensor:
        """The normalized hidden states: an operand (rows, hidden_size)."""
        layers = [partial(self._layer, ops, i=i) for i in range(len(self.layers))]
        state = ops.layers(self.embedded(ops), layers, checkpointing=checkpointing)
        return self.norm.trace(ops, self.stream(ops, state), f"{self.prefix}{self.final_norm}")

    def _layer(self, ops: LayerOps, state: State, i: int) -> State:
        state = self.layers[i].trace(ops, state, i, self._at(i))
        if self.images is None or i >= self.images.deepstack:
            return state
        return {**state, STREAM: ops.with_features(state[STREAM], i + 1)}

    def embedded(self, ops: LayerOps) -> State:
        if self.norms_within and self.embedding_norm is not None:
            return {STREAM: ops.normed_embedding(self.embedding_norm)}
        h = ops.embedding(self.embedding_scale, self.noise_scale)
        if self.embedding_norm is not None:
            h = ops.plain_rms_norm(h, self.embedding_norm, float32=True)
        return {STREAM: h}

    def stream(self, ops: LayerOps, state: State) -> Tensor:
        """The input of the final norm, by the state after the last layer."""
        return state[STREAM]

    def within(self, prefix: str, stored: str | None = None) -> Decoder:
        """The same as a part of a vision-language model, where its modules have another prefix.

        ``stored`` is a prefix that files may have in its place, ``language_model.`` of all of
        it, the head too.
        """
        prefixes: tuple[tuple[str, str], ...] = ()
        if stored == "language_model.":
            prefixes = ((prefix, f"{stored}model."), ("lm_head.", f"{stored}lm_head."))
        elif stored is not None:
            prefixes = ((prefix, stored),)
        return replace(self, prefix=prefix, stored_prefixes=prefixes, adapted_within=prefix)

    def alone(self, i: int) -> Decoder:
        """A decoder of only the i-th layer, for timing."""
        return replace(self, layers=(self.layers[i],))

    @property
    def layer_prefix(self) -> str:
        return f"{self.prefix}layers."

    def _at(self, i: int) -> str:
        return f"{self.layer_prefix}{i}."


def read_decoder(
    read: ConfigReader,
    norm: Norm,
    layers: Layer | Sequence[Layer],
    *,
    ties: bool = False,
    **more: Any,
) -> Decoder:
    """A decoder of different layers, or of equal ones, and ``more`` of its fields.

    The head is tied by ``tie_word_embeddings``, whose default is ``ties``.
    """
    every = [layers] if isinstance(layers, Layer) else [*layers]
    mixers = [layer.attention for layer in every if layer.attention is not None]
    dimensions = mixers[0].dimensions
    if isinstance(layers, Layer):
        every *= dimensions.num_hidden_layers
    tied = read.flag("tie_word_embeddings", ties)
    return Decoder(dimensions, norm, tuple(every), tied, **more)


@dataclass(frozen=True)
class DecoderFamily:
    """A family whose models are a ``Decoder``."""

    # Reads a config.json, and refuses what is not supported.
    compose: Callable[[ConfigReader], Decoder]

    def read(self, config: Mapping[str, Any]) -> Architecture:
        for part in (config, config.get("text_config")):
            if isinstance(part, Mapping):
                ConfigReader(part).choice("is_causal", (True,), True)
        decoder = self.compose(ConfigReader(config))
        architecture = decoder.architecture()
        if not decoder.pads:
            return architecture
        padding = padding_idx(config, architecture.vocab_size, decoder.pad_token_id)
        return replace(architecture, padding_idx=padding)

    def forward(
        self,
        g: Graph,
        config: Decoder,
        modules: Modules,
        batch: BatchBuffers,
        *,
        checkpointing: bool,
    ) -> Tensor:
        return config.trace(LayerOps(g, modules, batch), checkpointing=checkpointing)
