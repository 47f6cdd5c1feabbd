"""Llama (Touvron et al., 2023; Grattafiori et al., 2024): Llama 1 to 3, TinyLlama, SmolLM.

Several later families differ from it by a detail or two, and say so in a file of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families.family import Architecture, ConfigReader, ExpertSpec, Modules
from qlora_wgpu.families.layers import NO_DROPOUT, Dimensions, LayerOps
from qlora_wgpu.families.moe import Experts
from qlora_wgpu.families.rope import Rope, read_rope
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.activation import ACTIVATIONS
from qlora_wgpu.ops.attention import attention
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.glu import glu
from qlora_wgpu.ops.rope import rope


@dataclass(frozen=True)
class LlamaDetails:
    """What families of Llama's kind differ in.

    Attributes:
        qkv_bias: Whether q, k and v have biases.
        o_bias: Whether o has one.
        mlp_bias: Whether gate, up and down have.
        head_norm: Whether each head of q and k is normalized before it is rotated.
        windows: How far back each layer sees; None for everything.
        rotated: Which layers rotate their heads; None for all.
        activation: Of the gate.
        norm_offset: Added to the norms' weights.
        embedding_scale: Of the embedding.
        residual_scale: Of what each half of a layer adds.
        attention_scale: Of the scores; None for 1 / √head_dim.
        logit_scale: Of the logits.
        tied: Whether the head is the embedding where no key says it.
        experts: What some layers have instead of an MLP.
    """

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_norm: bool = False
    windows: tuple[int | None, ...] | None = None
    rotated: tuple[bool, ...] | None = None
    activation: str = "silu"
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    attention_scale: float | None = None
    logit_scale: float = 1.0
    tied: bool = False
    experts: Experts | None = None

    def experts_of(self, layer: int) -> Experts | None:
        """The mixture that a layer has instead of an MLP, if any."""
        return self.experts if self.experts is not None and self.experts.layers[layer] else None


@dataclass(frozen=True)
class LlamaConfig:
    """What the forward needs of a config.json."""

    dimensions: Dimensions
    details: LlamaDetails
    rms_norm_eps: float
    rope: Rope


class Llama:
    """The family, and what others are made from."""

    default_theta = 10_000.0

    def details(
        self, config: Mapping[str, Any], read: ConfigReader, dimensions: Dimensions
    ) -> LlamaDetails:
        """What the config.json of this very family says."""
        bias = read.flag("attention_bias")
        return LlamaDetails(
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=read.flag("mlp_bias"),
            activation=read.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
        )

    def dimensions(self, read: ConfigReader) -> Dimensions:
        """Its dimensions."""
        return Dimensions.read(read)

    def read(self, config: Mapping[str, Any]) -> Architecture:
        """Reads a config.json."""
        read = ConfigReader(config)
        dimensions = self.dimensions(read)
        details = self.details(config, read, dimensions)
        read.choice("attention_dropout", NO_DROPOUT)
        if details.residual_scale != 1.0 and (details.o_bias or details.mlp_bias):
            raise UnsupportedModelError(
                "config.json: residual_multiplier together with biases is not supported"
            )
        linears, norms = [], {}
        experts: list[ExpertSpec] = []
        routers: dict[str, tuple[int, int]] = {}
        for i, at in enumerate(dimensions.layers()):
            linears += dimensions.attention(at, details.qkv_bias, details.o_bias)
            mixture = details.experts_of(i)
            if mixture is None:
                linears += dimensions.gated_mlp(at, details.mlp_bias)
            else:
                experts += mixture.specs(at, dimensions.hidden_size)
                routers |= mixture.router(at, dimensions.hidden_size)
            norms[at + "input_layernorm.weight"] = dimensions.hidden_size
            norms[at + "post_attention_layernorm.weight"] = dimensions.hidden_size
            if details.head_norm:
                norms[at + "self_attn.q_norm.weight"] = dimensions.head_dim
                norms[at + "self_attn.k_norm.weight"] = dimensions.head_dim
        norms["model.norm.weight"] = dimensions.hidden_size
        eps = read.number("rms_norm_eps", 1e-6)
        turn = read_rope(config, dimensions.head_dim, default_theta=self.default_theta)
        return Architecture(
            config=LlamaConfig(dimensions, details, eps, turn),
            vocab_size=dimensions.vocab_size,
            hidden_size=dimensions.hidden_size,
            num_layers=dimensions.num_layers,
            linears=tuple(linears),
            norms=norms,
            tied=read.flag("tie_word_embeddings", details.tied),
            norm_offset=details.norm_offset,
            logit_scale=details.logit_scale,
            experts=tuple(experts),
            routers=routers,
        )

    def forward(
        self,
        g: Graph,
        config: LlamaConfig,
        modules: Modules,
        batch: BatchBuffers,
        *,
        checkpointing: bool,
    ) -> Tensor:
        """Traces the model up to the final norm."""
        trace, dimensions, details = LayerOps(g, modules, batch), config.dimensions, config.details
        head_dim, eps, scale = dimensions.head_dim, config.rms_norm_eps, details.residual_scale
        score_scale = details.attention_scale or 1 / math.sqrt(head_dim)
        table = g.constant("rope table", config.rope.table(batch.span))

        def heads(x: Tensor, at: str, name: str, i: int) -> Tensor:
            y = trace.linear(x, f"{at}self_attn.{name}_proj")
            if details.head_norm:
                y = trace.head_norm(y, f"{at}self_attn.{name}_norm", eps)
            if details.rotated is not None and not details.rotated[i]:
                return y
            return rope(g, y, table, batch, head_dim, config.rope.rotary_dim)

        def layer(h: Tensor, i: int) -> Tensor:
            at = f"model.layers.{i}."
            x = trace.rms_norm(h, at + "input_layernorm", eps)
            q, k = heads(x, at, "q", i), heads(x, at, "k", i)
            v = trace.linear(x, at + "self_attn.v_proj")
            window = details.windows[i] if details.windows is not None else None
            o = attention(g, q, k, v, batch, head_dim, score_scale, window)
            h = trace.linear(o, at + "self_attn.o_proj", h, multiplier=scale)
            x = trace.rms_norm(h, at + "post_attention_layernorm", eps)
            mixture = details.experts_of(i)
            if mixture is not None:
                return mixture.forward(trace, x, h, at, details.activation)
            gate = trace.linear(x, at + "mlp.gate_proj")
            up = trace.linear(x, at + "mlp.up_proj")
            x = glu(g, gate, up, details.activation)
            return trace.linear(x, at + "mlp.down_proj", h, multiplier=scale)

        h = trace.embedding(details.embedding_scale)
        h = trace.layers(h, layer, dimensions.num_layers, checkpointing=checkpointing)
        return trace.rms_norm(h, "model.norm", eps)


FAMILY = Llama()
