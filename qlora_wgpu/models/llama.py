"""Llama (Touvron et al., 2023; Grattafiori et al., 2024): Llama 1 to 3, TinyLlama, SmolLM."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.models.family import Architecture, ConfigReader, LinearSpec, Modules
from qlora_wgpu.models.rope import inverse_frequencies, rotation_table
from qlora_wgpu.ops.activation import ACTIVATIONS
from qlora_wgpu.ops.attention import attention
from qlora_wgpu.ops.batch import Batch
from qlora_wgpu.ops.embedding import embedding
from qlora_wgpu.ops.glu import glu
from qlora_wgpu.ops.linear import linear
from qlora_wgpu.ops.rms_norm import rms_norm
from qlora_wgpu.ops.rope import rope


@dataclass(frozen=True)
class LlamaConfig:
    """What the forward needs of a config.json."""

    num_layers: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    frequencies: npt.NDArray[np.float32]


class Llama:
    """The family."""

    def read(self, config: Mapping[str, Any]) -> Architecture:
        """Reads a Llama config.json."""
        read = ConfigReader(config)
        hidden, inter = read.integer("hidden_size"), read.integer("intermediate_size")
        layers, heads = read.integer("num_hidden_layers"), read.integer("num_attention_heads")
        kv_heads = read.integer("num_key_value_heads", heads)
        head_dim = read.integer("head_dim", hidden // heads)
        if heads % kv_heads:
            raise UnsupportedModelError(
                f"config.json: num_attention_heads {heads} is no multiple of "
                f"num_key_value_heads {kv_heads}"
            )
        if head_dim % 2:
            raise UnsupportedModelError(f"config.json: head_dim {head_dim} is odd")
        read.choice("attention_dropout", (0, 0.0, None))
        read.choice("partial_rotary_factor", (1, 1.0, None))
        attention_bias, mlp_bias = read.flag("attention_bias"), read.flag("mlp_bias")

        linears: list[LinearSpec] = []
        norms: dict[str, int] = {}
        for i in range(layers):
            at = f"model.layers.{i}."
            linears += [
                LinearSpec(at + "self_attn.q_proj", heads * head_dim, hidden, attention_bias),
                LinearSpec(at + "self_attn.k_proj", kv_heads * head_dim, hidden, attention_bias),
                LinearSpec(at + "self_attn.v_proj", kv_heads * head_dim, hidden, attention_bias),
                LinearSpec(at + "self_attn.o_proj", hidden, heads * head_dim, attention_bias),
                LinearSpec(at + "mlp.gate_proj", inter, hidden, mlp_bias),
                LinearSpec(at + "mlp.up_proj", inter, hidden, mlp_bias),
                LinearSpec(at + "mlp.down_proj", hidden, inter, mlp_bias),
            ]
            norms[at + "input_layernorm.weight"] = hidden
            norms[at + "post_attention_layernorm.weight"] = hidden
        norms["model.norm.weight"] = hidden
        return Architecture(
            config=LlamaConfig(
                num_layers=layers,
                head_dim=head_dim,
                rms_norm_eps=read.number("rms_norm_eps", 1e-6),
                hidden_act=read.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
                frequencies=inverse_frequencies(config, head_dim),
            ),
            vocab_size=read.integer("vocab_size"),
            hidden_size=hidden,
            num_layers=layers,
            linears=tuple(linears),
            norms=norms,
            tied=read.flag("tie_word_embeddings"),
        )

    def forward(
        self, g: Graph, config: LlamaConfig, modules: Modules, batch: Batch, *, checkpointing: bool
    ) -> Tensor:
        """Traces the model up to the final norm."""
        table = g.constant("rope table", rotation_table(config.frequencies, batch.seq))

        def norm(h: Tensor, name: str) -> Tensor:
            return rms_norm(g, h, modules.norms[name + ".weight"], config.rms_norm_eps)

        def project(x: Tensor, name: str, residual: Tensor | None = None) -> Tensor:
            return linear(g, x, modules.linears[name], batch, residual)

        def rotate(x: Tensor) -> Tensor:
            return rope(g, x, table, batch, config.head_dim, config.head_dim)

        def layer(h: Tensor, at: str) -> Tensor:
            x = norm(h, at + "input_layernorm")
            q = rotate(project(x, at + "self_attn.q_proj"))
            k = rotate(project(x, at + "self_attn.k_proj"))
            v = project(x, at + "self_attn.v_proj")
            o = attention(g, q, k, v, batch, config.head_dim, 1 / math.sqrt(config.head_dim))
            h = project(o, at + "self_attn.o_proj", residual=h)
            x = norm(h, at + "post_attention_layernorm")
            gate = project(x, at + "mlp.gate_proj")
            up = project(x, at + "mlp.up_proj")
            return project(glu(g, gate, up, config.hidden_act), at + "mlp.down_proj", residual=h)

        h = embedding(g, modules.embedding, batch)
        for i in range(config.num_layers):
            at = f"model.layers.{i}."
            if checkpointing:
                h = g.checkpoint(lambda x, at=at: layer(x, at), h)  # type: ignore[misc]
            else:
                h = layer(h, at)
        return norm(h, "model.norm")


FAMILY = Llama()
