"""Attention of a layer: projections, norms and windows, and their trace."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from qlora_wgpu.families.family import LinearSpec, NormSize, Weights
from qlora_wgpu.families.parts.config import ConfigReader, Dimensions
from qlora_wgpu.families.parts.layer_ops import LayerOps
from qlora_wgpu.families.parts.rope import Rope
from qlora_wgpu.graph.tensor import Tensor

Windows = tuple[int | None, ...]
"""The window of each layer; None for full attention."""


def layer_windows(read: ConfigReader, slides: Sequence[bool]) -> Windows:
    """The windows by ``layer_types`` or by default ``slides``, all of size ``sliding_window``."""
    types = read.config.get("layer_types")
    if types is not None:
        kinds = ("full_attention", "sliding_attention")
        types = read.layer_kinds("layer_types", kinds, len(slides))
        slides = [name == "sliding_attention" for name in types]
    if not any(slides):
        return (None,) * len(slides)
    window = read.integer("sliding_window")
    return tuple(window if slide else None for slide in slides)


def periodic_windows(read: ConfigReader, layers: int, every: int) -> Windows:
    """All layers slide but every n-th: ``sliding_window_pattern``, by default ``every``."""
    if read.config.get("layer_types") is not None:
        return layer_windows(read, [False] * layers)  # other forms of the key do not count
    every = read.integer("sliding_window_pattern", every)
    return layer_windows(read, [(i + 1) % every != 0 for i in range(layers)])


def upper_windows(read: ConfigReader, layers: int) -> Windows:
    """If ``use_sliding_window`` is true, layers slide from ``max_window_layers`` on."""
    read = read.with_defaults(sliding_window=4096, max_window_layers=28)  # Hugging Face's
    if not read.flag("use_sliding_window") or read.config["sliding_window"] is None:
        return (None,) * layers  # layer_types may still exist, with full attention in all layers
    first = read.number("max_window_layers", 28)
    return layer_windows(read, [i >= first for i in range(layers)])


KeysValues = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class QKNorm:
    """RMSNorm of queries and keys."""

    eps: float  # added under the root
    per_head: bool = True  # whether each head is normalized, with the same weight; else all at once
    names: tuple[str, str] = ("q_norm", "k_norm")  # the modules of queries and of keys
    after_rope: bool = False  # whether it is applied after RoPE

    def weights(self, at: str, dimensions: Dimensions) -> Weights:
        query_size, key_size = dimensions.query_size, dimensions.key_value_size
        if self.per_head:
            query_size = key_size = dimensions.head_dim
        q_norm, k_norm = self.names
        return Weights(norms={f"{at}{q_norm}.weight": query_size, f"{at}{k_norm}.weight": key_size})

    def trace(self, ops: LayerOps, x: Tensor, name: str) -> Tensor:
        """Normalizes queries or keys: operands per head, float32 all at once."""
        norm = ops.qk_norm if self.per_head else ops.rms_norm
        return norm(x, name, self.eps)


@dataclass(frozen=True)
class PlainQKNorm:
    """RMSNorm of each head of queries and keys, without a weight."""

    eps: float  # added under the root
    head_dim: int  # elements of a head
    after_rope: bool = False  # whether it is applied after RoPE
    names: ClassVar[tuple[str, str]] = ("q_norm", "k_norm")
    per_head: ClassVar[bool] = True

    def weights(self, at: str, dimensions: Dimensions) -> Weights:
        return Weights()

    def trace(self, ops: LayerOps, x: Tensor, name: str) -> Tensor:
        return ops.plain_qk_norm(x, self.head_dim, self.eps)


@dataclass(frozen=True)
class QKLayerNorm:
    """LayerNorm of each head of queries and keys, before RoPE."""

    eps: float  # added to the variance
    names: tuple[str, str] = ("q_norm", "k_norm")  # the modules of queries and of keys
    # Whether all heads share one weight and one bias; else each has its own weight.
    shared: bool = False
    per_head: ClassVar[bool] = True
    after_rope: ClassVar[bool] = False

    def weights(self, at: str, dimensions: Dimensions) -> Weights:
        if self.shared:
            leaves = [f"{at}{name}.{leaf}" for name in self.names for leaf in ("weight", "bias")]
            return Weights(norms=dict.fromkeys(leaves, dimensions.head_dim))
        query_heads, key_heads = dimensions.num_attention_heads, dimensions.num_key_value_heads
        q_norm, k_norm = self.names
        return Weights(
            norms={
                f"{at}{q_norm}.weight": (query_heads, dimensions.head_dim),
                f"{at}{k_norm}.weight": (key_heads, dimensions.head_dim),
            }
        )

    def trace(self, ops: LayerOps, x: Tensor, name: str) -> Tensor:
        return ops.qk_layer_norm(x, name, self.eps)


@dataclass(frozen=True)
class FusedQKV:
    """q, k and v as one layer."""

    name: str = "qkv_proj"  # the layer's name
    # Whether each head's query, key and value are neighbours; else all queries come first, then all
    # keys.
    by_head: bool = False


@dataclass(frozen=True)
class Attention:
    """Causal attention with grouped keys and values."""

    dimensions: Dimensions  # the decoder's dimensions
    rope: Rope | None  # None if the layer has no positions
    window: int | None = None  # the sliding window in tokens; None for full attention
    qkv_bias: bool = False  # whether q, k and v have biases
    o_bias: bool = False  # whether o has a bias
    fused: FusedQKV | None = None  # if q, k and v are one layer
    qk_norm: QKNorm | PlainQKNorm | QKLayerNorm | None = (
        None  # the norm of queries and keys, if any
    )
    interleaved: bool = False  # whether RoPE rotates neighbours instead of a head's halves
    scale: float | None = None  # factor of the scores; None for 1 / √head_dim
    softcap: float | None = None  # scores s become softcap · tanh(s / softcap), if given
    query_rope: Rope | None = None  # the queries' RoPE, if different from the keys'
    output: str = "o_proj"  # the name of the output projection
    # Whether q_proj also computes, next to each head's query, a gate whose sigmoid multiplies the
    # head's output.
    gated: bool = False
    # The name of a layer of the same input whose sigmoid multiplies the heads' outputs, if any.
    gate: str | None = None
    sinks: bool = False  # whether each head has a learned logit without a value, ``sinks``
    # The epsilon of a norm of each head's values, without a weight; None without a norm.
    value_norm: float | None = None
    keys_as_values: bool = False  # whether values are k's output before norm and RoPE
    shared: bool = False  # whether it uses the keys and values of an earlier layer
    clip: float | None = None  # bound of values, and of queries and keys before RoPE
    name: str = "self_attn"  # the module's name within a layer

    def weights(self, at: str) -> Weights:
        at += f"{self.name}."
        hidden_size = self.dimensions.hidden_size
        sizes = {name: size for name, (_, size) in self._columns.items()}
        if self.gated:
            sizes["q"] *= 2
        sizes = {f"{name}_proj": size for name, size in sizes.items()}
        if self.fused is not None:
            sizes = {self.fused.name: sum(sizes.values())}
        linears = [
            LinearSpec(f"{at}{name}", size, hidden_size, self.qkv_bias)
            for name, size in sizes.items()
        ]
        if self.gate is not None:
            linears.append(LinearSpec(at + self.gate, self.dimensions.query_size, hidden_size))
        o = LinearSpec(f"{at}{self.output}", hidden_size, self.dimensions.query_size, self.o_bias)
        sinks = {f"{at}sinks": self.dimensions.num_attention_heads} if self.sinks else {}
        return Weights((*linears, o), {**self._norms(at), **sinks})

    def _norms(self, at: str) -> Mapping[str, NormSize]:
        if self.qk_norm is None:
            return {}
        norms = self.qk_norm.weights(at, self.dimensions).norms
        absent = at + self.qk_norm.names[1] if self.shared else None
        return {n: size for n, size in norms.items() if absent is None or not n.startswith(absent)}

    def trace(
        self, ops: LayerOps, x: Tensor, at: str, residual: Tensor | None, scale: float
    ) -> Tensor:
        q, pair, gate = self.project(ops, x, at)
        assert pair is not None  # a decoder that shares keys and values calls ``attend``
        return self.attend(ops, q, pair, at, residual, scale, gate)

    def project(
        self, ops: LayerOps, x: Tensor, at: str
    ) -> tuple[Tensor, KeysValues | None, Tensor | None]:
        """Queries of x, its keys and values unless another layer's are used, and gates if any."""
        at += f"{self.name}."
        if self.fused is None:
            wide = {f"{at}{name}_proj": self._is_float32(name) for name in self._columns}
            gates = {} if self.gate is None else {at + self.gate: False}
            ops.group(x, {**wide, **gates})
            each = [partial(ops.linear, x, name, float32=float32) for name, float32 in wide.items()]
        else:
            both = ops.linear(x, f"{at}{self.fused.name}")
            each = [partial(self._part, ops, both, name) for name in self._columns]
        make = dict(zip(self._columns, each, strict=True))
        q = make["q"]()
        keys = [] if self.shared else [make["k"]()]
        q, gate = self._query_and_gate(ops, q)
        if self.gate is not None:
            gate = ops.linear(x, at + self.gate)
        rotated = self._rotated(ops, at, [q, *keys])
        if self.shared:
            return rotated[0], None, gate
        v = keys[0] if self.keys_as_values else make["v"]()
        if self.value_norm is not None:
            v = ops.plain_qk_norm(v, self.dimensions.head_dim, self.value_norm)
        if self.clip is not None:
            v = ops.clip(v, self.clip)
        return rotated[0], (rotated[1], v), gate

    def attend(
        self,
        ops: LayerOps,
        q: Tensor,
        pair: KeysValues,
        at: str,
        residual: Tensor | None,
        scale: float,
        gate: Tensor | None = None,
    ) -> Tensor:
        """Attention and its output projection; see ``LayerOps.linear_out``."""
        score_scale = 1 / math.sqrt(self.dimensions.head_dim) if self.scale is None else self.scale
        head_dim, window, softcap = self.dimensions.head_dim, self.window, self.softcap
        at += f"{self.name}."
        sinks = f"{at}sinks" if self.sinks else None
        o = ops.attention(q, *pair, head_dim, score_scale, window, softcap, sinks)
        if gate is not None:
            o = ops.sigmoid_gate(o, gate)
        return ops.linear_out(o, f"{at}{self.output}", residual, scale)

    @property
    def _columns(self) -> dict[str, tuple[int, int]]:
        wide, narrow = self.dimensions.query_size, self.dimensions.key_value_size
        columns = {"q": (0, wide), "k": (wide, narrow), "v": (wide + narrow, narrow)}
        absent = ("k", "v") if self.shared else ("v",) if self.keys_as_values else ()
        return {name: place for name, place in columns.items() if name not in absent}

    def _part(self, ops: LayerOps, x: Tensor, name: str) -> Tensor:
        if self.fused is None or not self.fused.by_head:
            return ops.columns(x, *self._columns[name])
        heads, size = self.dimensions.num_attention_heads, self.dimensions.head_dim
        return ops.group_columns(x, heads, 3 * size, "qkv".index(name) * size, (size,))

    def _query_and_gate(self, ops: LayerOps, x: Tensor) -> tuple[Tensor, Tensor | None]:
        if not self.gated:
            return x, None
        heads, size = self.dimensions.num_attention_heads, self.dimensions.head_dim
        queries, gates = (
            ops.group_columns(x, heads, 2 * size, first, (size,)) for first in (0, size)
        )
        return queries, gates

    def _is_float32(self, name: str) -> bool:
        """Whether a projection's result is float32: a norm over all heads reads that."""
        return name != "v" and self.qk_norm is not None and not self.qk_norm.per_head

    def _rotated(self, ops: LayerOps, at: str, ys: list[Tensor]) -> list[Tensor]:
        norm, rope, head_dim = self.qk_norm, self.rope, self.dimensions.head_dim
        if norm is not None and not norm.after_rope:
            ys = [norm.trace(ops, y, at + name) for y, name in zip(ys, norm.names, strict=False)]
        if self.clip is not None:
            ys = [ops.clip(y, self.clip) for y in ys]
        if rope is not None and self.query_rope is None:
            ys = ops.ropes(ys, rope, head_dim, interleaved=self.interleaved)
        elif rope is not None and self.query_rope is not None:
            each = zip(ys, (self.query_rope, rope), strict=False)
            ys = [ops.rope(y, own, head_dim, interleaved=self.interleaved) for y, own in each]
        if norm is not None and norm.after_rope:
            ys = [norm.trace(ops, y, at + name) for y, name in zip(ys, norm.names, strict=False)]
        return ys


def read_attention(
    read: ConfigReader, dimensions: Dimensions, rope: Rope | None, bias: bool = False, **more: Any
) -> Attention:
    """Attention by Llama's keys: one gives biases to all four projections, ``bias`` without it."""
    read.no_dropout("attention_dropout")
    bias = read.flag("attention_bias", bias)
    return Attention(dimensions, rope, qkv_bias=bias, o_bias=bias, **more)
