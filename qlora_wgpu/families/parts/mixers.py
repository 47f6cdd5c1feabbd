"""Alternatives to attention: gated delta nets (Yang et al., 2024) and short convolutions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families.family import LinearSpec, NormSize, Weights
from qlora_wgpu.families.parts.config import ConfigReader, Dimensions
from qlora_wgpu.families.parts.layer_ops import LayerOps
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.limits import DELTA_KEY

_UNIT = 8  # elements that a delta net's kernels read at once


@dataclass(frozen=True)
class DeltaHeads:
    """Heads of queries and keys, each shared by the same number of value heads."""

    key_heads: int  # heads of queries, and of keys
    value_heads: int  # heads of values: a multiple of ``key_heads``
    key_dim: int  # elements of a query or key
    value_dim: int  # elements of a value

    @classmethod
    def read(cls, read: ConfigReader) -> DeltaHeads:
        heads = cls(
            read.integer("linear_num_key_heads", 16),
            read.integer("linear_num_value_heads", 32),
            read.integer("linear_key_head_dim", 128),
            read.integer("linear_value_head_dim", 128),
        )
        if heads.value_heads % heads.key_heads:
            raise UnsupportedModelError(
                f"config.json: linear_num_value_heads {heads.value_heads} must be a multiple of "
                f"linear_num_key_heads {heads.key_heads}"
            )
        if heads.key_dim > DELTA_KEY:
            raise UnsupportedModelError(
                f"config.json: linear_key_head_dim must be at most {DELTA_KEY}, got {heads.key_dim}"
            )
        sizes = {
            "linear_key_head_dim": heads.key_dim,
            "linear_value_head_dim": heads.value_dim,
        }
        for name, size in sizes.items():
            if size % _UNIT:
                raise UnsupportedModelError(
                    f"config.json: {name} {size} must be a multiple of {_UNIT}"
                )
        return heads

    @property
    def key_size(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: all queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def per_key(self) -> int:
        return self.value_heads // self.key_heads


@dataclass(frozen=True)
class GatedDeltaNet:
    """out_proj(norm(delta rule(silu(conv(q, k, v)), decay, beta)) · silu(z))."""

    dimensions: Dimensions  # the decoder's dimensions
    heads: DeltaHeads  # its own heads
    taps: int  # tokens that the convolution covers, the current one included
    eps: float  # of the norm of each head's output, added under the root
    # Whether q, k, v and z are one layer, and b and a another, with columns grouped by key head.
    fused: bool
    output: ClassVar[str] = "out_proj"  # the name of the output projection
    norm: ClassVar[str] = "norm"  # the name of the norm of each head's output
    largest: float = 1.0  # bound of beta: with 2, states may have negative eigenvalues

    def weights(self, at: str) -> Weights:
        at += "linear_attn."
        hidden_size, heads = self.dimensions.hidden_size, self.heads
        linears = [LinearSpec(at + n, size, hidden_size) for n, size in self._inputs.items()]
        linears.append(LinearSpec(at + self.output, hidden_size, heads.value_size))
        norms: dict[str, NormSize] = {
            **{f"{at}{n}.weight": (size, 1, self.taps) for n, size in self._convs.items()},
            f"{at}dt_bias": heads.value_heads,
            f"{at}A_log": heads.value_heads,
            f"{at}{self.norm}.weight": heads.value_dim,
        }
        return Weights(tuple(linears), norms, as_stored=frozenset(norms))

    @property
    def _convs(self) -> dict[str, int]:
        """The convolutions, and their channels."""
        return {"conv1d": self.heads.channels}

    @property
    def _inputs(self) -> dict[str, int]:
        """The layers of its input, and their rows."""
        heads = self.heads
        values, scalars = heads.value_size, heads.value_heads
        if self.fused:
            return {"in_proj_qkvz": heads.channels + values, "in_proj_ba": 2 * scalars}
        own = {"qkv": heads.channels, "z": values, "b": scalars, "a": scalars}
        return {f"in_proj_{name}": size for name, size in own.items()}

    def trace(
        self, ops: LayerOps, x: Tensor, at: str, residual: Tensor | None, scale: float
    ) -> Tensor:
        at, heads = at + "linear_attn.", self.heads
        q, k, v, z, b, a = self._projected(ops, x, at)
        decay, beta = ops.gated_delta_gates(a, b, at, self.largest)
        sizes = heads.key_heads, heads.value_heads, heads.key_dim, heads.value_dim
        o = ops.gated_delta_rule(q, k, v, decay, beta, *sizes)
        o = ops.gated_rms_norm(o, z, at + self.norm, self.eps)
        return ops.linear_out(o, at + self.output, residual, scale)

    def _projected(self, ops: LayerOps, x: Tensor, at: str) -> list[Tensor]:
        """q, k and v after the convolution, z, b and a."""
        mixed, *rest = (self._split if self.fused else self._each)(ops, x, at)
        mixed = ops.causal_conv(mixed, f"{at}conv1d")
        key_size = self.heads.key_size
        places = (0, key_size), (key_size, key_size), (2 * key_size, self.heads.value_size)
        return [*(ops.columns(mixed, *place) for place in places), *rest]

    def _each(self, ops: LayerOps, x: Tensor, at: str) -> list[Tensor]:
        """The result of each layer; those of the last two, b and a, are float32."""
        names = [at + name for name in self._inputs]
        wide = {name: name in names[-2:] for name in names}
        ops.group(x, wide)
        return [ops.linear(x, name, float32=float32) for name, float32 in wide.items()]

    def _split(self, ops: LayerOps, x: Tensor, at: str) -> list[Tensor]:
        """The same from two layers, whose columns are grouped by key head."""
        heads = self.heads
        key, value = heads.key_dim, heads.per_key * heads.value_dim
        qkvz = ops.linear(x, f"{at}in_proj_qkvz")
        ba = ops.linear(x, f"{at}in_proj_ba", float32=True)
        wide, narrow = 2 * key + 2 * value, 2 * heads.per_key
        mixed = ops.group_columns(qkvz, heads.key_heads, wide, 0, (key, key, value))
        z = ops.group_columns(qkvz, heads.key_heads, wide, 2 * key + value, (value,))
        b, a = (
            ops.group_columns(ba, heads.key_heads, narrow, first, (heads.per_key,), float32=True)
            for first in (0, heads.per_key)
        )
        return [mixed, z, b, a]


@dataclass(frozen=True)
class SeparateDeltaNet(GatedDeltaNet):
    """The same with layers and convolutions of q, k and v each, and other names (OLMo Hybrid)."""

    output: ClassVar[str] = "o_proj"
    norm: ClassVar[str] = "o_norm"

    @property
    def _inputs(self) -> dict[str, int]:
        heads = self.heads
        key, value, scalars = heads.key_size, heads.value_size, heads.value_heads
        own = {"q": key, "k": key, "v": value, "g": value, "b": scalars, "a": scalars}
        return {f"{name}_proj": size for name, size in own.items()}

    def _projected(self, ops: LayerOps, x: Tensor, at: str) -> list[Tensor]:
        mixed, rest = (made := self._each(ops, x, at))[:3], made[3:]
        pairs = zip(mixed, self._convs, strict=True)
        return [*(ops.causal_conv(each, at + name) for each, name in pairs), *rest]

    @property
    def _convs(self) -> dict[str, int]:
        key, value = self.heads.key_size, self.heads.value_size
        return {"q_conv1d": key, "k_conv1d": key, "v_conv1d": value}


@dataclass(frozen=True)
class ShortConv:
    """out_proj(C · conv(B · v)), with B, C and v of in_proj(x)."""

    dimensions: Dimensions  # the decoder's dimensions
    taps: int  # tokens that the convolution covers, the current one included
    bias: bool = False  # whether the convolution and both projections have biases

    def weights(self, at: str) -> Weights:
        at, size = f"{at}conv.", self.dimensions.hidden_size
        in_proj = LinearSpec(f"{at}in_proj", 3 * size, size, self.bias)
        out_proj = LinearSpec(f"{at}out_proj", size, size, self.bias)
        frozen: dict[str, NormSize] = {f"{at}conv.weight": (size, 1, self.taps)}
        if self.bias:
            frozen[f"{at}conv.bias"] = size
        return Weights((in_proj, out_proj), frozen)

    def trace(
        self, ops: LayerOps, x: Tensor, at: str, residual: Tensor | None, scale: float
    ) -> Tensor:
        y = ops.short_conv(ops.linear(x, f"{at}conv.in_proj"), f"{at}conv.conv")
        return ops.linear_out(y, f"{at}conv.out_proj", residual, scale)
