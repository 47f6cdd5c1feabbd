"""A decoder put together from norm, attention, MLP and residual order.

Each part says which weights it has and traces itself, so names and forward stand side by side. A
family's file reads config.json into a ``Decoder``; one that does not fit writes its own forward.
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
from qlora_wgpu.families.parts.mixers import GatedDeltaNet, ShortConv
from qlora_wgpu.families.parts.norm import Norm
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.batch import BatchBuffers


@dataclass(frozen=True)
class ResidualOrder:
    """The places of a layer's norms, by their names; None where there is none."""

    before_attention: str | None = None  # the norm of attention's input
    # The norm of attention's output, before it is added to the residual stream.
    after_attention: str | None = None
    before_mlp: str | None = None  # the norm of the MLP's input
    after_mlp: str | None = None  # the norm of the MLP's output
    # Whether both halves read the layer's input: by a norm of each, or what ``before_attention``
    # makes where the MLP has none.
    parallel: bool = False

    @property
    def names(self) -> list[str]:
        """The norms that a layer has."""
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
"""The residual stream among what layers hand on."""


class Half(Protocol):
    """Attention or an MLP: a half of a layer."""

    def weights(self, at: str) -> Weights:
        """The half's weights in the layer whose names begin with ``at``."""

    def trace(
        self, ops: LayerOps, x: Tensor, at: str, residual: Tensor | None, scale: float
    ) -> Tensor:
        """Adds scale times the half's output for x to the residual; or that alone, in float32."""


@dataclass(frozen=True)
class Layer:
    """One layer of a decoder."""

    norm: Norm  # the kind of all the layer's norms
    # The first half, or what stands in place of attention.
    attention: Attention | LatentAttention | ShortConv | GatedDeltaNet
    mlp: Half  # the second half
    order: ResidualOrder = PRE_NORM  # the places of the norms
    residual_scale: float = 1.0  # factor of what each half adds

    def weights(self, at: str) -> Weights:
        """The weights of the layer whose names begin so."""
        weights = self.attention.weights(at) + self.mlp.weights(at)
        for name in self.order.names:
            weights += self.norm.weights(at + name, self.attention.dimensions.hidden_size)
        return weights

    def trace(self, ops: LayerOps, state: State, i: int, at: str) -> State:
        """What the i-th layer, whose modules' names begin so, hands on of what it is given."""
        order, scale, h = self.order, self.residual_scale, state[STREAM]
        x = of_mlp = self._before(ops, h, at, order.before_attention)
        if order.parallel and order.before_mlp is not None:
            of_mlp = self._before(ops, h, at, order.before_mlp)
        residual = h if order.after_attention is None else None
        made = self.attention.trace(ops, x, at, residual, scale)
        h = self._after(ops, made, h, at, order.after_attention)
        if not order.parallel:
            of_mlp = self._before(ops, h, at, order.before_mlp)
        residual = h if order.after_mlp is None else None
        made = self.mlp.trace(ops, of_mlp, at, residual, scale)
        return {**state, STREAM: self._after(ops, made, h, at, order.after_mlp)}

    def _before(self, ops: LayerOps, h: Tensor, at: str, name: str | None) -> Tensor:
        return ops.operand(h) if name is None else self.norm.trace(ops, h, at + name)

    def _after(self, ops: LayerOps, made: Tensor, h: Tensor, at: str, name: str | None) -> Tensor:
        return made if name is None else self.norm.trace(ops, made, at + name, residual=h)


@dataclass(frozen=True)
class Decoder:
    """A whole model up to its final norm, and what its logits go through."""

    dimensions: Dimensions  # the model's sizes
    norm: Norm  # the final one
    layers: tuple[Layer, ...]  # from the first to the last
    tied: bool  # whether the head is the embedding
    # Hugging Face's default of that key, if it has one: see ``padding_idx``.
    pad_token_id: int | None = None
    prefix: str = "model."  # how the names of its modules begin
    stored_prefixes: tuple[tuple[str, str], ...] = (("model.", ""),)  # see ``Architecture``
    embedding_scale: float = 1.0  # factor of the embedding
    # Factor of NEFTune's noise, which Hugging Face adds to what the embedding's module returns: the
    # factor of that, where the model multiplies it later.
    noise_scale: float = 1.0
    logit_scale: float = 1.0  # factor of the head's product
    logit_softcap: float | None = None  # bound of the logits, if any
    notes: tuple[str, ...] = ()  # see ``Architecture``
    embedding: str = "embed_tokens"  # the embedding's module, within ``prefix``
    final_norm: str = "norm"  # the final norm's module, within ``prefix``
    head_bias: bool = False  # whether the logits have a bias
    # Whether the embedding has a row that gets no gradient, if ``pad_token_id`` names one.
    pads: bool = True
    adapted_within: str = ""  # see ``Architecture``
    balance: BalanceLoss | None = None  # see ``Architecture``

    def weights(self) -> Weights:
        """All weights but the embedding and the head."""
        weights = Weights()
        for i, layer in enumerate(self.layers):
            weights += layer.weights(self._at(i))
        name = f"{self.prefix}{self.final_norm}"
        return weights + self.norm.weights(name, self.dimensions.hidden_size)

    def architecture(self) -> Architecture:
        """The architecture, which is what the rest of the package needs of a decoder."""
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
        )

    def trace(self, ops: LayerOps, *, checkpointing: bool) -> Tensor:
        """The normalized hidden states, (rows, hidden_size) operand."""
        layers = [
            partial(layer.trace, ops, i=i, at=self._at(i)) for i, layer in enumerate(self.layers)
        ]
        state = ops.layers(self.embedded(ops), layers, checkpointing=checkpointing)
        return self.norm.trace(ops, state[STREAM], f"{self.prefix}{self.final_norm}")

    def embedded(self, ops: LayerOps) -> State:
        """What the first layer is given."""
        return {STREAM: ops.embedding(self.embedding_scale, self.noise_scale)}

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
        """A decoder of one of the layers, which is what is timed in place of all."""
        return replace(self, layers=(self.layers[i],))

    @property
    def layer_prefix(self) -> str:
        """How names of modules in a layer begin, up to the layer's number."""
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
    """A decoder of some layers, or of one that all are like, and ``more`` of its fields.

    Its head is the embedding if ``tie_word_embeddings`` says so, or by default if ``ties``.
    """
    if isinstance(layers, Layer):
        layers = (layers,) * layers.attention.dimensions.num_hidden_layers
    tied, dimensions = read.flag("tie_word_embeddings", ties), layers[0].attention.dimensions
    return Decoder(dimensions, norm, tuple(layers), tied, **more)


@dataclass(frozen=True)
class DecoderFamily:
    """A family whose models are such decoders."""

    # Reads a config.json into one, and refuses what it does not compute.
    compose: Callable[[ConfigReader], Decoder]

    def read(self, config: Mapping[str, Any]) -> Architecture:
        """Reads a config.json."""
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
        """Traces the model up to the final norm."""
        return config.trace(LayerOps(g, modules, batch), checkpointing=checkpointing)
