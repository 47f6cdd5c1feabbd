"""What most families share: dimensions, layers by their names, ops by the names of weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families.family import ConfigReader, LinearSpec, Modules
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.embedding import embedding
from qlora_wgpu.ops.experts import expert_linear
from qlora_wgpu.ops.layer_norm import layer_norm
from qlora_wgpu.ops.linear import linear
from qlora_wgpu.ops.modules import Linear
from qlora_wgpu.ops.qk_norm import qk_norm
from qlora_wgpu.ops.rms_norm import rms_norm
from qlora_wgpu.ops.routing import Routing

NO_DROPOUT = (0, 0.0, None)


@dataclass(frozen=True)
class Dimensions:
    """A decoder's dimensions, by Hugging Face's names."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int

    @classmethod
    def read(cls, read: ConfigReader, head_dim: int | None = None) -> Dimensions:
        """Reads them.

        Args:
            read: The config.json.
            head_dim: Where neither ``head_dim`` nor a division says it.

        Raises:
            UnsupportedModelError: If they do not fit each other.
        """
        hidden, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
        kv_heads = read.integer("num_key_value_heads", heads)
        dim = read.integer("head_dim", head_dim or hidden // heads)
        if heads % kv_heads:
            raise UnsupportedModelError(
                f"config.json: num_attention_heads {heads} is no multiple of "
                f"num_key_value_heads {kv_heads}"
            )
        if dim % 2:
            raise UnsupportedModelError(f"config.json: head_dim {dim} is odd")
        inter, layers = read.integer("intermediate_size"), read.integer("num_hidden_layers")
        return cls(hidden, inter, layers, heads, kv_heads, dim, read.integer("vocab_size"))

    def attention(self, at: str, qkv_bias: bool, o_bias: bool) -> list[LinearSpec]:
        """q, k, v and o of a layer."""
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return [
            LinearSpec(at + "self_attn.q_proj", wide, self.hidden_size, qkv_bias),
            LinearSpec(at + "self_attn.k_proj", narrow, self.hidden_size, qkv_bias),
            LinearSpec(at + "self_attn.v_proj", narrow, self.hidden_size, qkv_bias),
            LinearSpec(at + "self_attn.o_proj", self.hidden_size, wide, o_bias),
        ]

    def gated_mlp(self, at: str, bias: bool = False) -> list[LinearSpec]:
        """Gate, up and down of a layer."""
        return [
            LinearSpec(at + "mlp.gate_proj", self.intermediate_size, self.hidden_size, bias),
            LinearSpec(at + "mlp.up_proj", self.intermediate_size, self.hidden_size, bias),
            LinearSpec(at + "mlp.down_proj", self.hidden_size, self.intermediate_size, bias),
        ]

    def layers(self) -> list[str]:
        """How the names of each layer's weights begin."""
        return [f"model.layers.{i}." for i in range(self.num_layers)]


def layer_windows(
    config: Mapping[str, Any], read: ConfigReader, layers: int, otherwise: list[bool]
) -> tuple[int | None, ...]:
    """The sliding window of each layer, None where all earlier tokens are seen.

    Args:
        config: The config.json.
        read: The same.
        layers: How many layers there are.
        otherwise: Which layers slide where ``layer_types`` does not say it.
    """
    types = config.get("layer_types")
    slides = otherwise
    if types is not None:
        known = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or len(types) != layers or not set(types) <= set(known):
            raise UnsupportedModelError(
                f"config.json: layer_types must name {' or '.join(known)} for each of the "
                f"{layers} layers"
            )
        slides = [name == "sliding_attention" for name in types]
    if not any(slides):
        return (None,) * layers
    window = read.integer("sliding_window")
    return tuple(window if slide else None for slide in slides)


class LayerOps:
    """Ops by the names of their weights, for a forward to read like the model."""

    def __init__(self, g: Graph, modules: Modules, batch: BatchBuffers) -> None:
        """Wraps what every op needs."""
        self.g = g
        self.batch = batch
        self._modules = modules

    def embedding(self, scale: float = 1.0) -> Tensor:
        """The batch's tokens, (rows, hidden_size) float32."""
        return embedding(self.g, self._modules.embedding, self.batch, scale)

    def linear(
        self, x: Tensor, name: str, residual: Tensor | None = None, **options: Any
    ) -> Tensor:
        """The layer of that name; see ``ops.linear``."""
        return linear(self.g, x, self._modules.linears[name], self.batch, residual, **options)

    def expert_linear(self, x: Tensor, name: str, routing: Routing) -> Tensor:
        """The layer of that name of every expert."""
        layer = self._modules.experts[name]
        return expert_linear(self.g, x, layer, routing, self.batch)

    def router(self, x: Tensor, name: str) -> Tensor:
        """float32 logits by the matrix of that module."""
        matrix = self._modules.routers[name + ".weight"]
        return linear(self.g, x, Linear(name, matrix, None, None), self.batch, float32=True)

    def rms_norm(self, x: Tensor, name: str, eps: float, residual: Tensor | None = None) -> Tensor:
        """RMSNorm by the weight of that module."""
        return rms_norm(self.g, x, self._modules.norms[name + ".weight"], eps, residual)

    def head_norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        """RMSNorm of each head by the weight of that module."""
        return qk_norm(self.g, x, self._modules.norms[name + ".weight"], eps)

    def layer_norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        """LayerNorm by the weight, and the bias if there is one, of that module."""
        norms = self._modules.norms
        return layer_norm(self.g, x, norms[name + ".weight"], norms.get(name + ".bias"), eps)

    def layers(
        self, h: Tensor, layer: Callable[[Tensor, int], Tensor], count: int, *, checkpointing: bool
    ) -> Tensor:
        """Applies ``layer(h, i)`` for every i, recomputing each in the backward if asked for."""
        for i in range(count):
            if checkpointing:
                h = self.g.checkpoint(lambda x, i=i: layer(x, i), h)  # type: ignore[misc]
            else:
                h = layer(h, i)
        return h
