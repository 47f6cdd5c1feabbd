"""Multi-head latent attention (DeepSeek-V2, 2024): keys and values from a narrow latent vector.

A head's query and key have a part without positions and a rotated part, which all keys of a token
share. Here the rotated part comes first in both, which does not change any score; keys or values,
whichever are shorter, are padded with zeros.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families.family import LinearSpec, NormSize, Weights
from qlora_wgpu.families.parts.config import ConfigReader, Dimensions
from qlora_wgpu.families.parts.layer_ops import LayerOps
from qlora_wgpu.families.parts.rope import Rope, read_rope
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.columns import HeadPart

EPS = 1e-6
"""The epsilon of both norms of latent vectors, independent of config.json."""


@dataclass(frozen=True)
class LatentAttention:
    """Causal attention whose keys and values are computed from a latent vector."""

    dimensions: Dimensions  # the decoder's dimensions
    rope: Rope  # of the rotated part
    q_rank: int | None  # elements of the queries' latent vector; None if they have none
    kv_rank: int  # elements of the latent vector of keys and values
    nope_dim: int  # elements of a head without positions
    rope_dim: int  # elements of a head that are rotated
    v_dim: int  # elements of a head's value
    scale: float  # factor of the scores
    bias: bool = False  # whether the latent vectors and the output have biases
    interleaved: bool = True  # whether neighbours are rotated, instead of halves

    @property
    def query_dim(self) -> int:
        return self.rope_dim + self.nope_dim

    @property
    def head_dim(self) -> int:
        """Elements of a head in attention, zeros included: an even number."""
        longest = max(self.query_dim, self.v_dim)
        return longest + longest % 2

    def weights(self, at: str) -> Weights:
        at += "self_attn."
        hidden, heads = self.dimensions.hidden_size, self.dimensions.num_attention_heads
        queries, latent = heads * self.query_dim, self.kv_rank + self.rope_dim
        norms: dict[str, NormSize] = {f"{at}kv_a_layernorm.weight": self.kv_rank}
        first = [LinearSpec(f"{at}q_proj", queries, hidden)]
        if self.q_rank is not None:
            first = [
                LinearSpec(f"{at}q_a_proj", self.q_rank, hidden, self.bias),
                LinearSpec(f"{at}q_b_proj", queries, self.q_rank),
            ]
            norms[f"{at}q_a_layernorm.weight"] = self.q_rank
        rest = (
            LinearSpec(f"{at}kv_a_proj_with_mqa", latent, hidden, self.bias),
            LinearSpec(f"{at}kv_b_proj", heads * (self.nope_dim + self.v_dim), self.kv_rank),
            LinearSpec(f"{at}o_proj", hidden, heads * self.v_dim, self.bias),
        )
        return Weights((*first, *rest), norms)

    def trace(
        self, ops: LayerOps, x: Tensor, at: str, residual: Tensor | None, scale: float
    ) -> Tensor:
        at += "self_attn."
        nope, turned, v_dim = self.nope_dim, self.rope_dim, self.v_dim
        heads, head_dim = self.dimensions.num_attention_heads, self.head_dim
        queries, own = self._queries(ops, x, at), self.query_dim
        q = [HeadPart(queries, own, nope, turned), HeadPart(queries, own, 0, nope)]
        latent = ops.linear(x, f"{at}kv_a_proj_with_mqa")
        narrow = ops.columns(latent, 0, self.kv_rank)
        made = ops.linear(ops.rms_norm(narrow, f"{at}kv_a_layernorm", EPS), f"{at}kv_b_proj")
        of_head = nope + v_dim
        k = [HeadPart(latent, 0, self.kv_rank, turned), HeadPart(made, of_head, 0, nope)]
        v = [HeadPart(made, of_head, nope, v_dim)]
        turning = [ops.head_parts(parts, heads, head_dim) for parts in (q, k)]
        turned_q, turned_k = ops.ropes(turning, self.rope, head_dim, interleaved=self.interleaved)
        values = ops.head_parts(v, heads, head_dim)
        o = ops.attention(turned_q, turned_k, values, head_dim, self.scale)
        if v_dim < head_dim:
            o = ops.head_parts([HeadPart(o, head_dim, 0, v_dim)], heads, v_dim)
        return ops.linear_out(o, f"{at}o_proj", residual, scale)

    def _queries(self, ops: LayerOps, x: Tensor, at: str) -> Tensor:
        if self.q_rank is None:
            return ops.linear(x, f"{at}q_proj")
        narrow = ops.linear(x, f"{at}q_a_proj", float32=True)
        return ops.linear(ops.rms_norm(narrow, f"{at}q_a_layernorm", EPS), f"{at}q_b_proj")


def read_latent_attention(
    read: ConfigReader, sizes: Mapping[str, int], q_rank: int
) -> LatentAttention:
    read = read.with_defaults(q_lora_rank=q_rank)
    kv_rank, nope_dim, rope_dim, v_dim = (read.integer(key, own) for key, own in sizes.items())
    read = ConfigReader({**read.config, "head_dim": rope_dim})
    dimensions = Dimensions.read(read)
    rope = read_rope(read.config, rope_dim)
    heads = dimensions.num_attention_heads
    if dimensions.num_key_value_heads != heads:
        raise UnsupportedModelError(
            f"config.json: num_key_value_heads must equal num_attention_heads {heads} in latent "
            f"attention, got {dimensions.num_key_value_heads}"
        )
    for part in (read, ConfigReader(_scaling(read))):
        part.choice("partial_rotary_factor", (1.0, None))
    return LatentAttention(
        dimensions,
        rope,
        read.optional_integer("q_lora_rank"),
        kv_rank,
        nope_dim,
        rope_dim,
        v_dim,
        scale=_stretched(read) ** 2 / math.sqrt(nope_dim + rope_dim),
        bias=read.flag("attention_bias"),
        interleaved=read.flag("rope_interleave", True),
    )


def _scaling(read: ConfigReader) -> Mapping[str, Any]:
    """RoPE's parameters, by the new key or the old one."""
    return read.config.get("rope_parameters") or read.config.get("rope_scaling") or {}


def _stretched(read: ConfigReader) -> float:
    """YaRN's factor of queries and of keys, by ``mscale_all_dim``."""
    scaling = _scaling(read)
    inner = ConfigReader(scaling)
    if (scaling.get("rope_type") or scaling.get("type") or "default") == "default":
        return 1.0
    factor, share = inner.number("factor", 1.0), inner.number("mscale_all_dim", 0.0)
    return 0.1 * share * math.log(factor) + 1 if factor > 1 else 1.0
