"""OLMo 2 (Walsh et al., 2025): Llama whose norms come after, and over all of q and of k."""

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
from qlora_wgpu.ops.tensor import cast


@dataclass(frozen=True)
class Olmo2Config:
    """What the forward needs of a config.json."""

    dimensions: Dimensions
    rms_norm_eps: float
    hidden_act: str
    rope: Rope


class Olmo2:
    """The family."""

    def read(self, config: Mapping[str, Any]) -> Architecture:
        """Reads a config.json."""
        read = ConfigReader(config)
        dimensions = Dimensions.read(read)
        read.choice("attention_dropout", NO_DROPOUT)
        bias = read.flag("attention_bias")
        linears, norms = [], {}
        for at in dimensions.layers():
            linears += dimensions.attention(at, bias, bias) + dimensions.gated_mlp(at)
            norms[at + "self_attn.q_norm.weight"] = dimensions.heads * dimensions.head_dim
            norms[at + "self_attn.k_norm.weight"] = dimensions.kv_heads * dimensions.head_dim
            norms[at + "post_attention_layernorm.weight"] = dimensions.hidden_size
            norms[at + "post_feedforward_layernorm.weight"] = dimensions.hidden_size
        norms["model.norm.weight"] = dimensions.hidden_size
        return Architecture(
            config=Olmo2Config(
                dimensions=dimensions,
                rms_norm_eps=read.number("rms_norm_eps", 1e-5),
                hidden_act=read.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
                rope=read_rope(config, dimensions.head_dim),
            ),
            vocab_size=dimensions.vocab_size,
            hidden_size=dimensions.hidden_size,
            num_layers=dimensions.num_layers,
            linears=tuple(linears),
            norms=norms,
            tied=read.flag("tie_word_embeddings"),
        )

    def forward(
        self,
        g: Graph,
        config: Olmo2Config,
        modules: Modules,
        batch: BatchBuffers,
        *,
        checkpointing: bool,
    ) -> Tensor:
        """Traces the model up to the final norm."""
        trace, dimensions, eps = LayerOps(g, modules, batch), config.dimensions, config.rms_norm_eps
        table = g.constant("rope table", config.rope.table(batch.span))

        def heads(x: Tensor, at: str, name: str) -> Tensor:
            y = trace.linear(x, f"{at}self_attn.{name}_proj", float32=True)
            y = trace.rms_norm(y, f"{at}self_attn.{name}_norm", eps)
            return rope(g, y, table, batch, dimensions.head_dim, config.rope.rotary_dim)

        def layer(h: Tensor, i: int) -> Tensor:
            at = f"model.layers.{i}."
            x = cast(g, h)
            q, k = heads(x, at, "q"), heads(x, at, "k")
            v = trace.linear(x, at + "self_attn.v_proj")
            o = attention(
                g, q, k, v, batch, dimensions.head_dim, 1 / math.sqrt(dimensions.head_dim)
            )
            o = trace.linear(o, at + "self_attn.o_proj", float32=True)
            h = trace.rms_norm(o, at + "post_attention_layernorm", eps, residual=h)
            x = cast(g, h)
            gate = trace.linear(x, at + "mlp.gate_proj")
            up = trace.linear(x, at + "mlp.up_proj")
            x = glu(g, gate, up, config.hidden_act)
            x = trace.linear(x, at + "mlp.down_proj", float32=True)
            return trace.rms_norm(x, at + "post_feedforward_layernorm", eps, residual=h)

        h = trace.layers(
            trace.embedding(), layer, dimensions.num_layers, checkpointing=checkpointing
        )
        return trace.rms_norm(h, "model.norm", eps)


FAMILY = Olmo2()
