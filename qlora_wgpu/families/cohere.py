"""Command R (Cohere, 2024): both halves of a layer at once, LayerNorms, neighbours rotated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qlora_wgpu.families.family import Architecture, ConfigReader, Modules
from qlora_wgpu.families.layers import NO_DROPOUT, Dimensions, LayerOps
from qlora_wgpu.families.rope import Rope, read_rope
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.activation import ACTIVATIONS
from qlora_wgpu.ops.attention import attention
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.glu import glu
from qlora_wgpu.ops.rope import rope


@dataclass(frozen=True)
class CohereConfig:
    """What the forward needs of a config.json."""

    dimensions: Dimensions
    layer_norm_eps: float
    hidden_act: str
    rope: Rope


class Cohere:
    """The family."""

    def read(self, config: Mapping[str, Any]) -> Architecture:
        """Reads a config.json."""
        read = ConfigReader(config)
        dimensions = Dimensions.read(read)
        read.choice("attention_dropout", NO_DROPOUT)
        read.choice("use_qk_norm", (None, False))
        bias = read.flag("attention_bias")
        linears, norms = [], {}
        for at in dimensions.layers():
            linears += dimensions.attention(at, bias, bias) + dimensions.gated_mlp(at)
            norms[at + "input_layernorm.weight"] = dimensions.hidden_size
        norms["model.norm.weight"] = dimensions.hidden_size
        return Architecture(
            config=CohereConfig(
                dimensions=dimensions,
                layer_norm_eps=read.number("layer_norm_eps", 1e-5),
                hidden_act=read.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
                rope=read_rope(config, dimensions.head_dim, default_theta=500_000.0),
            ),
            vocab_size=dimensions.vocab_size,
            hidden_size=dimensions.hidden_size,
            num_layers=dimensions.num_layers,
            linears=tuple(linears),
            norms=norms,
            tied=read.flag("tie_word_embeddings", True),
            logit_scale=read.number("logit_scale", 0.0625),
        )

    def forward(
        self,
        g: Graph,
        config: CohereConfig,
        modules: Modules,
        batch: BatchBuffers,
        *,
        checkpointing: bool,
    ) -> Tensor:
        """Traces the model up to the final norm."""
        trace, dimensions = LayerOps(g, modules, batch), config.dimensions
        eps = config.layer_norm_eps
        head_dim = dimensions.head_dim
        table = g.constant("rope table", config.rope.table(batch.span))

        def rotate(x: Tensor) -> Tensor:
            turned = config.rope.rotary_dim
            return rope(g, x, table, batch, head_dim, turned, interleaved=True)

        def layer(h: Tensor, i: int) -> Tensor:
            at = f"model.layers.{i}."
            x = trace.layer_norm(h, at + "input_layernorm", eps)
            q = rotate(trace.linear(x, at + "self_attn.q_proj"))
            k = rotate(trace.linear(x, at + "self_attn.k_proj"))
            v = trace.linear(x, at + "self_attn.v_proj")
            o = attention(g, q, k, v, batch, head_dim, 1 / math.sqrt(head_dim))
            h = trace.linear(o, at + "self_attn.o_proj", h)
            gate = trace.linear(x, at + "mlp.gate_proj")
            up = trace.linear(x, at + "mlp.up_proj")
            return trace.linear(glu(g, gate, up, config.hidden_act), at + "mlp.down_proj", h)

        h = trace.layers(
            trace.embedding(), layer, dimensions.num_layers, checkpointing=checkpointing
        )
        return trace.layer_norm(h, "model.norm", eps)


FAMILY = Cohere()
