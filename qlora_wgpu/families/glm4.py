"""GLM-4 (0414): norms before and after each half, neighbours rotated, gate and up in one layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qlora_wgpu.families.family import Architecture, ConfigReader, LinearSpec, Modules
from qlora_wgpu.families.layers import NO_DROPOUT, Dimensions, LayerOps
from qlora_wgpu.families.rope import Rope, read_rope
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.activation import ACTIVATIONS
from qlora_wgpu.ops.attention import attention
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.columns import columns
from qlora_wgpu.ops.glu import glu
from qlora_wgpu.ops.rope import rope

_NORMS = (
    "input_layernorm",
    "post_self_attn_layernorm",
    "post_attention_layernorm",
    "post_mlp_layernorm",
)


@dataclass(frozen=True)
class Glm4Config:
    """What the forward needs of a config.json."""

    dimensions: Dimensions
    rms_norm_eps: float
    hidden_act: str
    rope: Rope


class Glm4:
    """The family."""

    def read(self, config: Mapping[str, Any]) -> Architecture:
        """Reads a config.json."""
        read = ConfigReader(config)
        dimensions = Dimensions.read(read, head_dim=128)
        read.choice("attention_dropout", NO_DROPOUT)
        bias = read.flag("attention_bias", True)
        hidden, inter = dimensions.hidden_size, dimensions.intermediate_size
        linears: list[LinearSpec] = []
        norms: dict[str, int] = {}
        for at in dimensions.layers():
            linears += dimensions.attention(at, bias, False)
            linears += [
                LinearSpec(at + "mlp.gate_up_proj", 2 * inter, hidden),
                LinearSpec(at + "mlp.down_proj", hidden, inter),
            ]
            norms |= {f"{at}{name}.weight": hidden for name in _NORMS}
        norms["model.norm.weight"] = hidden
        return Architecture(
            config=Glm4Config(
                dimensions=dimensions,
                rms_norm_eps=read.number("rms_norm_eps", 1.5625e-7),
                hidden_act=read.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
                rope=read_rope(config, dimensions.head_dim, default_partial=0.5),
            ),
            vocab_size=dimensions.vocab_size,
            hidden_size=hidden,
            num_layers=dimensions.num_layers,
            linears=tuple(linears),
            norms=norms,
            tied=read.flag("tie_word_embeddings"),
        )

    def forward(
        self,
        g: Graph,
        config: Glm4Config,
        modules: Modules,
        batch: BatchBuffers,
        *,
        checkpointing: bool,
    ) -> Tensor:
        """Traces the model up to the final norm."""
        trace, dimensions, eps = LayerOps(g, modules, batch), config.dimensions, config.rms_norm_eps
        head_dim, inter = dimensions.head_dim, dimensions.intermediate_size
        table = g.constant("rope table", config.rope.table(batch.span))

        def rotate(x: Tensor) -> Tensor:
            turned = config.rope.rotary_dim
            return rope(g, x, table, batch, head_dim, turned, interleaved=True)

        def layer(h: Tensor, i: int) -> Tensor:
            at = f"model.layers.{i}."
            x = trace.rms_norm(h, at + "input_layernorm", eps)
            q = rotate(trace.linear(x, at + "self_attn.q_proj"))
            k = rotate(trace.linear(x, at + "self_attn.k_proj"))
            v = trace.linear(x, at + "self_attn.v_proj")
            o = attention(g, q, k, v, batch, head_dim, 1 / math.sqrt(head_dim))
            o = trace.linear(o, at + "self_attn.o_proj", float32=True)
            h = trace.rms_norm(o, at + "post_self_attn_layernorm", eps, residual=h)
            x = trace.rms_norm(h, at + "post_attention_layernorm", eps)
            both = trace.linear(x, at + "mlp.gate_up_proj")
            gate, up = columns(g, both, 0, inter), columns(g, both, inter, inter)
            x = glu(g, gate, up, config.hidden_act)
            x = trace.linear(x, at + "mlp.down_proj", float32=True)
            return trace.rms_norm(x, at + "post_mlp_layernorm", eps, residual=h)

        h = trace.layers(
            trace.embedding(), layer, dimensions.num_layers, checkpointing=checkpointing
        )
        return trace.rms_norm(h, "model.norm", eps)


FAMILY = Glm4()
