"""StarCoder 2 (Lozhkov et al., 2024): LayerNorms, biases, a window and a plain MLP."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qlora_wgpu.families.family import Architecture, ConfigReader, LinearSpec, Modules
from qlora_wgpu.families.layers import Dimensions, LayerOps
from qlora_wgpu.families.rope import Rope, read_rope
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.activation import ACTIVATIONS, activation
from qlora_wgpu.ops.attention import attention
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.rope import rope


@dataclass(frozen=True)
class Starcoder2Config:
    """What the forward needs of a config.json."""

    dimensions: Dimensions
    norm_epsilon: float
    hidden_act: str
    window: int | None
    rope: Rope


class Starcoder2:
    """The family. Its dropouts are not applied, and a note says so where they are not zero."""

    def read(self, config: Mapping[str, Any]) -> Architecture:
        """Reads a config.json."""
        read = ConfigReader(config)
        dimensions = Dimensions.read(read)
        bias = read.flag("use_bias", True)
        hidden, inter = dimensions.hidden_size, dimensions.intermediate_size
        linears: list[LinearSpec] = []
        norms: dict[str, int] = {}
        for at in dimensions.layers():
            linears += dimensions.attention(at, bias, bias)
            linears += [
                LinearSpec(at + "mlp.c_fc", inter, hidden, bias),
                LinearSpec(at + "mlp.c_proj", hidden, inter, bias),
            ]
            for name in ("input_layernorm", "post_attention_layernorm"):
                norms |= {f"{at}{name}.weight": hidden, f"{at}{name}.bias": hidden}
        norms |= {"model.norm.weight": hidden, "model.norm.bias": hidden}
        window = config.get("sliding_window")
        dropouts = {
            key: read.number(key, 0.0)
            for key in ("attention_dropout", "residual_dropout", "embedding_dropout")
        }
        return Architecture(
            config=Starcoder2Config(
                dimensions=dimensions,
                norm_epsilon=read.number("norm_epsilon", 1e-5),
                hidden_act=read.choice("hidden_act", tuple(ACTIVATIONS), "gelu_pytorch_tanh"),
                window=None if window is None else read.integer("sliding_window"),
                rope=read_rope(config, dimensions.head_dim),
            ),
            vocab_size=dimensions.vocab_size,
            hidden_size=hidden,
            num_layers=dimensions.num_layers,
            linears=tuple(linears),
            norms=norms,
            tied=read.flag("tie_word_embeddings", True),
            notes=tuple(
                f"{key} = {value} of config.json is not applied in training"
                for key, value in dropouts.items()
                if value
            ),
        )

    def forward(
        self,
        g: Graph,
        config: Starcoder2Config,
        modules: Modules,
        batch: BatchBuffers,
        *,
        checkpointing: bool,
    ) -> Tensor:
        """Traces the model up to the final norm."""
        trace, dimensions, eps = LayerOps(g, modules, batch), config.dimensions, config.norm_epsilon
        table = g.constant("rope table", config.rope.table(batch.span))

        def rotate(x: Tensor) -> Tensor:
            return rope(g, x, table, batch, dimensions.head_dim, config.rope.rotary_dim)

        def layer(h: Tensor, i: int) -> Tensor:
            at = f"model.layers.{i}."
            x = trace.layer_norm(h, at + "input_layernorm", eps)
            q = rotate(trace.linear(x, at + "self_attn.q_proj"))
            k = rotate(trace.linear(x, at + "self_attn.k_proj"))
            v = trace.linear(x, at + "self_attn.v_proj")
            scale = 1 / math.sqrt(dimensions.head_dim)
            o = attention(g, q, k, v, batch, dimensions.head_dim, scale, config.window)
            h = trace.linear(o, at + "self_attn.o_proj", h)
            x = trace.layer_norm(h, at + "post_attention_layernorm", eps)
            x = activation(g, trace.linear(x, at + "mlp.c_fc"), config.hidden_act)
            return trace.linear(x, at + "mlp.c_proj", h)

        h = trace.layers(
            trace.embedding(), layer, dimensions.num_layers, checkpointing=checkpointing
        )
        return trace.layer_norm(h, "model.norm", eps)


FAMILY = Starcoder2()
