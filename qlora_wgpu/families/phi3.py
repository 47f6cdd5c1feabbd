"""Phi 3, 3.5 and 4-mini (Abdin et al., 2024): Llama with q, k, v in one layer, gate and up too."""

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


@dataclass(frozen=True)
class Phi3Config:
    """What the forward needs of a config.json."""

    dimensions: Dimensions
    rms_norm_eps: float
    hidden_act: str
    window: int | None
    rope: Rope


class Phi3:
    """The family."""

    def read(self, config: Mapping[str, Any]) -> Architecture:
        """Reads a config.json."""
        read = ConfigReader(config)
        dimensions = Dimensions.read(read)
        for key in ("attention_dropout", "embd_pdrop", "resid_pdrop"):
            read.choice(key, NO_DROPOUT)
        read.choice("attention_bias", (None, False))
        hidden, inter = dimensions.hidden_size, dimensions.intermediate_size
        wide, narrow = (
            dimensions.heads * dimensions.head_dim,
            dimensions.kv_heads * dimensions.head_dim,
        )
        linears: list[LinearSpec] = []
        norms: dict[str, int] = {}
        for at in dimensions.layers():
            linears += [
                LinearSpec(at + "self_attn.qkv_proj", wide + 2 * narrow, hidden),
                LinearSpec(at + "self_attn.o_proj", hidden, wide),
                LinearSpec(at + "mlp.gate_up_proj", 2 * inter, hidden),
                LinearSpec(at + "mlp.down_proj", hidden, inter),
            ]
            norms[at + "input_layernorm.weight"] = hidden
            norms[at + "post_attention_layernorm.weight"] = hidden
        norms["model.norm.weight"] = hidden
        window = config.get("sliding_window")
        return Architecture(
            config=Phi3Config(
                dimensions=dimensions,
                rms_norm_eps=read.number("rms_norm_eps", 1e-5),
                hidden_act=read.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
                window=None if window is None else read.integer("sliding_window"),
                rope=read_rope(config, dimensions.head_dim),
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
        config: Phi3Config,
        modules: Modules,
        batch: BatchBuffers,
        *,
        checkpointing: bool,
    ) -> Tensor:
        """Traces the model up to the final norm."""
        trace, dimensions, eps = LayerOps(g, modules, batch), config.dimensions, config.rms_norm_eps
        table = g.constant("rope table", config.rope.table(batch.span))
        wide, narrow = (
            dimensions.heads * dimensions.head_dim,
            dimensions.kv_heads * dimensions.head_dim,
        )
        inter = dimensions.intermediate_size

        def rotate(x: Tensor) -> Tensor:
            return rope(g, x, table, batch, dimensions.head_dim, config.rope.rotary_dim)

        def layer(h: Tensor, i: int) -> Tensor:
            at = f"model.layers.{i}."
            x = trace.rms_norm(h, at + "input_layernorm", eps)
            qkv = trace.linear(x, at + "self_attn.qkv_proj")
            q = rotate(columns(g, qkv, 0, wide))
            k = rotate(columns(g, qkv, wide, narrow))
            v = columns(g, qkv, wide + narrow, narrow)
            scale = 1 / math.sqrt(dimensions.head_dim)
            o = attention(g, q, k, v, batch, dimensions.head_dim, scale, config.window)
            h = trace.linear(o, at + "self_attn.o_proj", h)
            x = trace.rms_norm(h, at + "post_attention_layernorm", eps)
            both = trace.linear(x, at + "mlp.gate_up_proj")
            gate, up = columns(g, both, 0, inter), columns(g, both, inter, inter)
            return trace.linear(glu(g, gate, up, config.hidden_act), at + "mlp.down_proj", h)

        h = trace.embedding()
        h = trace.layers(h, layer, dimensions.num_layers, checkpointing=checkpointing)
        return trace.rms_norm(h, "model.norm", eps)


FAMILY = Phi3()
