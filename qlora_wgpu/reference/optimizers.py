"""Clipping by the global norm, then AdamW, AdamW with 8-bit moments, or Lion, on a flat vector."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qlora_wgpu.quant.quantized_weight import dynamic_quant_map
from qlora_wgpu.reference.tape import Array

BLOCK = 256


def clipped(gradient: Array, tokens: int, max_norm: float) -> tuple[Array, float]:
    """The mean of a summed gradient, clipped to ``max_norm``, and its norm before clipping."""
    g = gradient / tokens
    norm = float(np.sqrt(np.sum(g * g)))
    return (g * min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else g), norm


@dataclass
class AdamW:
    """The parameters and AdamW's moments."""

    p: Array
    m: Array
    v: Array


def adamw(
    state: AdamW,
    gradient: Array,
    tokens: int,
    t: int,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    max_norm: float,
) -> float:
    """One step from a summed gradient; returns the norm of the mean gradient."""
    if not tokens:
        return 0.0
    g, norm = clipped(gradient, tokens, max_norm)
    state.m = beta1 * state.m + (1 - beta1) * g
    state.v = beta2 * state.v + (1 - beta2) * g * g
    hat_m, hat_v = state.m / (1 - beta1**t), state.v / (1 - beta2**t)
    state.p = state.p - lr * weight_decay * state.p - lr * hat_m / (np.sqrt(hat_v) + epsilon)
    return norm


@dataclass
class Quantized:
    """A moment: uint8 codes (n,), and the float64 scale of each block of 256 (ceil(n / 256),)."""

    codes: npt.NDArray[np.uint8]
    absmax: Array

    @classmethod
    def zeros(cls, length: int) -> Quantized:
        """The moment before the first step."""
        return cls(np.zeros(length, np.uint8), np.zeros(-(-length // BLOCK)))

    @classmethod
    def of(cls, x: Array, *, signed: bool) -> Quantized:
        """Each element's nearest code; a negative element never gets the code of zero."""
        absmax = np.array([np.abs(x[i : i + BLOCK]).max() for i in range(0, x.size, BLOCK)])
        values = dynamic_quant_map(signed=signed).astype(np.float64)
        codes = np.searchsorted(middles(signed=signed), normalized(x, absmax), side="left")
        codes -= (x < 0) & (values[codes] == 0)
        codes[np.repeat(absmax, BLOCK)[: x.size] == 0] = 0
        return cls(codes.astype(np.uint8), absmax)

    def values(self, *, signed: bool) -> Array:
        """The values of the codes."""
        scales = np.repeat(self.absmax, BLOCK)[: self.codes.size]
        return dynamic_quant_map(signed=signed).astype(np.float64)[self.codes] * scales


def middles(*, signed: bool) -> Array:
    """The boundaries between codes, between -1 and 1."""
    values = dynamic_quant_map(signed=signed).astype(np.float64)
    return (values[:-1] + values[1:]) / 2


def normalized(x: Array, absmax: Array) -> Array:
    """Elements divided by their block's largest magnitude; 0 if that is 0."""
    scales = np.repeat(absmax, BLOCK)[: x.size]
    return np.divide(x, scales, out=np.zeros_like(x), where=scales > 0)


@dataclass
class AdamW8Bit:
    """The parameters (n,) and both moments."""

    p: Array
    m: Quantized
    v: Quantized


def adamw_8bit(state: AdamW8Bit, gradient: Array, tokens: int, t: int, **rates: float) -> AdamW:
    """One step from a summed gradient; returns parameters, and moments before rounding."""
    exact = AdamW(state.p, state.m.values(signed=True), state.v.values(signed=False))
    adamw(exact, gradient, tokens, t, **rates)
    if tokens:
        state.p = exact.p
        state.m = Quantized.of(exact.m, signed=True)
        state.v = Quantized.of(exact.v, signed=False)
    return exact


@dataclass
class Lion:
    """The parameters and Lion's moment."""

    p: Array
    m: Array


def lion(
    state: Lion,
    gradient: Array,
    tokens: int,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    max_norm: float,
) -> tuple[float, Array]:
    """One step from a summed gradient."""
    if not tokens:
        return 0.0, np.zeros_like(state.p)
    g, norm = clipped(gradient, tokens, max_norm)
    between = beta1 * state.m + (1 - beta1) * g
    state.p = state.p * (1 - lr * weight_decay) - lr * np.sign(between)
    state.m = beta2 * state.m + (1 - beta2) * g
    return norm, between
