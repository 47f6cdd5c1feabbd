"""StableLM 2 and 3B (Bellagente et al., 2024): LayerNorms, and heads rotated in part."""

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
class StableLmConfig:
    """What the forward needs of a config.json."""

    dimensions: Dimensions
    layer_norm_eps: float
    hidden_act: str
    parallel: bool
    rope: Rope


class StableLm:
    """The family."""

    def read(self, config: Mapping[str, Any]) -> Architecture:
        """Reads a config.json."""
        read = ConfigReader(config)
        dimensions = Dimensions.read(read)
        read.choice("qk_layernorm", (None, False))
        for key in ("attention_dropout", "hidden_dropout"):
            read.choice(key, NO_DROPOUT)
        bias, parallel = read.flag("use_qkv_bias"), read.flag("use_parallel_residual")
        linears, norms = [], {}
        names = (
            ("input_layernorm",) if parallel else ("input_layernorm", "post_attention_layernorm")
        )
        for at in dimensions.layers():
            linears += dimensions.attention(at, bias, False) + dimensions.gated_mlp(at)
            for name in names:
                norms[f"{at}{name}.weight"] = norms[f"{at}{name}.bias"] = dimensions.hidden_size
        norms["model.norm.weight"] = norms["model.norm.bias"] = dimensions.hidden_size
        return Architecture(
            config=StableLmConfig(
                dimensions=dimensions,
                layer_norm_eps=read.number("layer_norm_eps", 1e-5),
                hidden_act=read.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
                parallel=parallel,
                rope=read_rope(config, dimensions.head_dim, default_partial=0.25),
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
        config: StableLmConfig,
        modules: Modules,
        batch: BatchBuffers,
        *,
        checkpointing: bool,
    ) -> Tensor:
        """Traces the model up to the final norm."""
        trace, dimensions = LayerOps(g, modules, batch), config.dimensions
        eps = config.layer_norm_eps
        table = g.constant("rope table", config.rope.table(batch.span))

        def rotate(x: Tensor) -> Tensor:
            return rope(g, x, table, batch, dimensions.head_dim, config.rope.rotary_dim)

        def layer(h: Tensor, i: int) -> Tensor:
            at = f"model.layers.{i}."
            x = trace.layer_norm(h, at + "input_layernorm", eps)
            q = rotate(trace.linear(x, at + "self_attn.q_proj"))
            k = rotate(trace.linear(x, at + "self_attn.k_proj"))
            v = trace.linear(x, at + "self_attn.v_proj")
            o = attention(
                g, q, k, v, batch, dimensions.head_dim, 1 / math.sqrt(dimensions.head_dim)
            )
            h = trace.linear(o, at + "self_attn.o_proj", h)
            if not config.parallel:
                x = trace.layer_norm(h, at + "post_attention_layernorm", eps)
            gate = trace.linear(x, at + "mlp.gate_proj")
            up = trace.linear(x, at + "mlp.up_proj")
            return trace.linear(glu(g, gate, up, config.hidden_act), at + "mlp.down_proj", h)

        h = trace.layers(
            trace.embedding(), layer, dimensions.num_layers, checkpointing=checkpointing
        )
        return trace.layer_norm(h, "model.norm", eps)


FAMILY = StableLm()
