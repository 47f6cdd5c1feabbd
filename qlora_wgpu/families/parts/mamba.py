"""Mamba 2's mixer (Dao & Gu, 2024): a selective state-space scan with a gated norm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from qlora_wgpu.errors import UnsupportedModelError, brief
from qlora_wgpu.families.family import LinearSpec, NormSize, Weights
from qlora_wgpu.families.parts.attention import Attention
from qlora_wgpu.families.parts.config import ConfigReader, Dimensions
from qlora_wgpu.families.parts.layer_ops import LayerOps
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.limits import STATE_SIZE

_UNIT = 8  # elements that the scan's kernels read at once
Limits = tuple[float, float | None]
"""Bounds of the time steps; None is no upper one."""


@dataclass(frozen=True)
class MambaSizes:
    """Heads of the scan; neighbouring ones share a group's B and C."""

    heads: int
    head_dim: int  # columns of a head's state, and elements of its x
    groups: int  # a divisor of ``heads``
    state_size: int  # rows of a state, and elements of B and C

    @classmethod
    def checked(cls, values: Mapping[str, int]) -> MambaSizes:
        """Checks sizes, in the order of the fields, by the keys of config.json."""
        heads, head_dim, groups, state_size = values
        sizes = cls(*values.values())
        if sizes.heads % sizes.groups:
            raise UnsupportedModelError(
                f"config.json: {heads} {sizes.heads} must be a multiple of {groups} {sizes.groups}"
            )
        for key, size in ((head_dim, sizes.head_dim), (state_size, sizes.state_size)):
            if size % _UNIT:
                raise UnsupportedModelError(
                    f"config.json: {key} {size} must be a multiple of {_UNIT}"
                )
        if sizes.state_size > STATE_SIZE:
            raise UnsupportedModelError(
                f"config.json: {state_size} must be at most {STATE_SIZE}, got {sizes.state_size}"
            )
        return sizes

    @property
    def inner_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Elements of B, and of C."""
        return self.groups * self.state_size

    @property
    def channels(self) -> int:
        """Columns of the convolution: x, B and C."""
        return self.inner_size + 2 * self.group_size


@dataclass(frozen=True)
class Mamba:
    """out_proj(norm(scan(silu(conv(x, B, C)), dt) · silu(z))), all of in_proj's output."""

    dimensions: Dimensions  # the decoder's dimensions
    sizes: MambaSizes  # its own heads
    taps: int  # tokens that the convolution covers, the current one included
    eps: float  # of the norm of each group, added under the root
    limits: Limits = (0.0, None)  # bounds of the time steps
    conv_bias: bool = True  # whether the convolution has a bias
    in_bias: bool = False  # whether the input projection has a bias
    out_bias: bool = False  # whether the output projection has a bias
    # Whether silu(z) multiplies the norm's input ("before") or output ("after"), or there is no
    # norm ("only").
    gate: Literal["before", "after", "only"] = "before"
    # Factors of z, x, B, C and dt, columns of the input projection.
    multipliers: tuple[float, ...] = (1.0,) * 5
    adapts_output: bool = True  # whether PEFT adapts the output projection
    name: str = "mamba"  # the module's name within a layer

    def weights(self, at: str) -> Weights:
        at, sizes = f"{at}{self.name}.", self.sizes
        hidden_size, inner = self.dimensions.hidden_size, sizes.inner_size
        rows = inner + sizes.channels + sizes.heads
        in_proj = LinearSpec(f"{at}in_proj", rows, hidden_size, self.in_bias)
        out_proj = LinearSpec(
            f"{at}out_proj", hidden_size, inner, self.out_bias, self.adapts_output
        )
        small: dict[str, NormSize] = {f"{at}conv1d.weight": (sizes.channels, 1, self.taps)}
        if self.conv_bias:
            small[f"{at}conv1d.bias"] = sizes.channels
        small |= dict.fromkeys((f"{at}{leaf}" for leaf in ("dt_bias", "A_log", "D")), sizes.heads)
        if self.gate != "only":
            small[f"{at}norm.weight"] = inner
        return Weights((in_proj, out_proj), small, as_stored=frozenset(small))

    def trace(
        self, ops: LayerOps, x: Tensor, at: str, residual: Tensor | None, scale: float
    ) -> Tensor:
        at, sizes = f"{at}{self.name}.", self.sizes
        inner = sizes.inner_size
        projected = ops.linear(x, f"{at}in_proj")
        if any(factor != 1.0 for factor in self.multipliers):
            widths = (inner, inner, sizes.group_size, sizes.group_size, sizes.heads)
            projected = ops.column_scale(projected, [*zip(self.multipliers, widths, strict=True)])
        z = ops.columns(projected, 0, inner)
        mixed = ops.causal_conv(ops.columns(projected, inner, sizes.channels), f"{at}conv1d")
        dt = ops.columns(projected, inner + sizes.channels, sizes.heads)
        dt = ops.mamba_steps(dt, at, self.limits)
        bc = ops.columns(mixed, inner, 2 * sizes.group_size)
        y = ops.mamba_scan(ops.columns(mixed, 0, inner), bc, dt, at, sizes.heads, sizes.state_size)
        if self.gate == "only":
            y = ops.glu(z, y, "silu")
        else:
            first = self.gate == "before"
            y = ops.gated_group_norm(y, z, f"{at}norm", self.eps, sizes.groups, first)
        return ops.linear_out(y, f"{at}out_proj", residual, scale)


@dataclass(frozen=True)
class ParallelMixers:
    """multiplier · attention(x) + mamba_multiplier · mamba(x)."""

    attention: Attention
    mamba: Mamba
    multiplier: float  # factor of attention's output
    mamba_multiplier: float  # factor of Mamba's output

    @property
    def dimensions(self) -> Dimensions:
        return self.attention.dimensions

    def weights(self, at: str) -> Weights:
        return self.mamba.weights(at) + self.attention.weights(at)

    def trace(
        self, ops: LayerOps, x: Tensor, at: str, residual: Tensor | None, scale: float
    ) -> Tensor:
        h = self.mamba.trace(ops, x, at, residual, scale * self.mamba_multiplier)
        return self.attention.trace(ops, x, at, h, scale * self.multiplier)


def read_limits(read: ConfigReader, key: str = "time_step_limit") -> Limits:
    """The bounds of the time steps; infinity as JSON has it, or as transformers writes it."""
    stored = read.config.get(key, [0.0, math.inf])
    limits = list(map(_number, stored)) if isinstance(stored, list | tuple) else []
    low, high = limits if len(limits) == 2 else (math.nan, math.nan)
    if not (0 <= low < math.inf and low <= high):
        raise UnsupportedModelError(
            f"config.json: {key} must be two numbers, the lower one first, got {brief(stored)}"
        )
    return low, None if high == math.inf else high


def _number(value: Any) -> float:
    if isinstance(value, Mapping) and value.get("__float__") == "Infinity":
        return math.inf
    return float(value) if isinstance(value, int | float) and type(value) is not bool else math.nan


def read_mamba(
    read: ConfigReader, dimensions: Dimensions, *, eps: float, inner_size: int | None = None
) -> Mamba:
    """The mixer by Bamba's keys; ``mamba_expand`` times the hidden size if not ``inner_size``."""
    read.integer("mamba_chunk_size", 256)  # results do not depend on it
    expanded = read.integer("mamba_expand", 2) * dimensions.hidden_size
    inner_size = expanded if inner_size is None else inner_size
    heads = read.integer("mamba_n_heads", 128)
    whole = read.config.get("mamba_d_head", "auto") == "auto"
    head_dim = max(inner_size // heads, 1) if whole else read.integer("mamba_d_head")
    if heads * head_dim != inner_size:
        raise UnsupportedModelError(
            f"config.json: mamba_n_heads {heads} times mamba_d_head {head_dim} must be {inner_size}"
        )
    sizes = {
        "mamba_n_heads": heads,
        "mamba_d_head": head_dim,
        "mamba_n_groups": read.integer("mamba_n_groups", 1),
        "mamba_d_state": read.integer("mamba_d_state", 256),
    }
    bias = read.flag("mamba_proj_bias")
    return Mamba(
        dimensions,
        MambaSizes.checked(sizes),
        read.integer("mamba_d_conv", 4),
        eps,
        read_limits(read),
        conv_bias=read.with_defaults(mamba_conv_bias=True).flag("mamba_conv_bias"),  # not by null
        in_bias=bias,
        out_bias=bias,
    )
