"""Gemma 2 (Riviere et al., 2024): norms before and after each half, windows, softcaps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families.family import Architecture, ConfigReader, Modules
from qlora_wgpu.families.layers import NO_DROPOUT, Dimensions, LayerOps, layer_windows
from qlora_wgpu.families.rope import Rope, read_rope
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.attention import attention
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.glu import glu
from qlora_wgpu.ops.rope import rope

_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


@dataclass(frozen=True)
class Gemma2Config:
    """What the forward needs of a config.json.

    Attributes:
        dimensions: Its dimensions.
        eps: Of the norms.
        windows: How far back each layer sees; None for everything.
        ropes: How each layer rotates.
        scale: Of the scores.
        softcap: Of the scores, if any.
        head_norm: Whether each head of q and k is normalized.
    """

    dimensions: Dimensions
    eps: float
    windows: tuple[int | None, ...]
    ropes: tuple[Rope, ...]
    scale: float
    softcap: float | None
    head_norm: bool


class Gemma2:
    """The family, and what Gemma 3 is made from."""

    prefix = ""  # of the modules' names, where text is a part of a model
    stored_prefixes: tuple[tuple[str, str], ...] = ()
    head_norm = False

    def text(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The part of a config.json that counts."""
        return config

    def sliding(self, config: Mapping[str, Any], layers: int) -> list[bool]:
        """Which layers slide where ``layer_types`` does not say it: every other one."""
        return [i % 2 == 0 for i in range(layers)]

    def ropes(
        self, config: Mapping[str, Any], head_dim: int, windows: tuple[int | None, ...]
    ) -> tuple[Rope, ...]:
        """How each layer rotates."""
        return (read_rope(config, head_dim),) * len(windows)

    def read(self, config: Mapping[str, Any]) -> Architecture:
        """Reads a config.json."""
        config = self.text(config)
        read = ConfigReader(config)
        dimensions = Dimensions.read(read, head_dim=256)
        read.choice("attention_dropout", NO_DROPOUT)
        read.choice("use_bidirectional_attention", (None, False))
        read.choice("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
        bias = read.flag("attention_bias")
        slides = self.sliding(config, dimensions.num_layers)
        given = {"sliding_window": 4096, **config}  # Hugging Face's default
        windows = layer_windows(given, ConfigReader(given), dimensions.num_layers, slides)
        linears = []
        norms: dict[str, int] = {}
        for i in range(dimensions.num_layers):
            at = self._at(i)
            linears += dimensions.attention(at, bias, bias) + dimensions.gated_mlp(at)
            norms |= {f"{at}{name}.weight": dimensions.hidden_size for name in _NORMS}
            if self.head_norm:
                norms[at + "self_attn.q_norm.weight"] = dimensions.head_dim
                norms[at + "self_attn.k_norm.weight"] = dimensions.head_dim
        norms[f"model.{self.prefix}norm.weight"] = dimensions.hidden_size
        scalar = read.number("query_pre_attn_scalar", 256.0)
        if scalar == 0:
            raise UnsupportedModelError("config.json: query_pre_attn_scalar must not be 0")
        return Architecture(
            config=Gemma2Config(
                dimensions=dimensions,
                eps=read.number("rms_norm_eps", 1e-6),
                windows=windows,
                ropes=self.ropes(config, dimensions.head_dim, windows),
                scale=1 / math.sqrt(scalar),
                softcap=self._softcap(config, "attn_logit_softcapping"),
                head_norm=self.head_norm,
            ),
            vocab_size=dimensions.vocab_size,
            hidden_size=dimensions.hidden_size,
            num_layers=dimensions.num_layers,
            linears=tuple(linears),
            norms=norms,
            tied=read.flag("tie_word_embeddings", True),
            embed_name=f"model.{self.prefix}embed_tokens.weight",
            stored_prefixes=self.stored_prefixes,
            norm_offset=1.0,
            logit_softcap=self._softcap(config, "final_logit_softcapping"),
        )

    def _at(self, i: int) -> str:
        return f"model.{self.prefix}layers.{i}."

    def _softcap(self, config: Mapping[str, Any], key: str) -> float | None:
        value = config.get(key, self.default_softcaps.get(key))
        if value is None:
            return None
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise UnsupportedModelError(
                f"config.json: {key} must be a number above zero or null, got {value!r}"
            )
        return float(value)

    default_softcaps: Mapping[str, float] = {
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }

    def forward(
        self,
        g: Graph,
        config: Gemma2Config,
        modules: Modules,
        batch: BatchBuffers,
        *,
        checkpointing: bool,
    ) -> Tensor:
        """Traces the model up to the final norm."""
        trace, dimensions, eps = LayerOps(g, modules, batch), config.dimensions, config.eps
        tables = {id(r): g.constant("rope table", r.table(batch.span)) for r in config.ropes}

        def heads(x: Tensor, at: str, name: str, i: int) -> Tensor:
            y = trace.linear(x, f"{at}self_attn.{name}_proj")
            if config.head_norm:
                y = trace.head_norm(y, f"{at}self_attn.{name}_norm", eps)
            turn = config.ropes[i]
            return rope(g, y, tables[id(turn)], batch, dimensions.head_dim, turn.rotary_dim)

        def layer(h: Tensor, i: int) -> Tensor:
            at = self._at(i)
            x = trace.rms_norm(h, at + "input_layernorm", eps)
            q, k = heads(x, at, "q", i), heads(x, at, "k", i)
            v = trace.linear(x, at + "self_attn.v_proj")
            o = attention(
                g,
                q,
                k,
                v,
                batch,
                dimensions.head_dim,
                config.scale,
                config.windows[i],
                config.softcap,
            )
            o = trace.linear(o, at + "self_attn.o_proj", float32=True)
            h = trace.rms_norm(o, at + "post_attention_layernorm", eps, residual=h)
            x = trace.rms_norm(h, at + "pre_feedforward_layernorm", eps)
            gate = trace.linear(x, at + "mlp.gate_proj")
            up = trace.linear(x, at + "mlp.up_proj")
            x = glu(g, gate, up, "gelu_pytorch_tanh")
            x = trace.linear(x, at + "mlp.down_proj", float32=True)
            return trace.rms_norm(x, at + "post_feedforward_layernorm", eps, residual=h)

        h = trace.embedding(math.sqrt(dimensions.hidden_size))
        h = trace.layers(h, layer, dimensions.num_layers, checkpointing=checkpointing)
        return trace.rms_norm(h, f"model.{self.prefix}norm", eps)


FAMILY = Gemma2()
