"""AdamW with blockwise 8-bit moments, on the elements of one tensor."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qlora_wgpu.quant.quantized_weight import dynamic_quant_map
from qlora_wgpu.reference import adamw

Array = npt.NDArray[np.float64]
BLOCK = 256


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
        """Each element's nearest code; a negative one's is never that of zero."""
        absmax = np.array([np.abs(x[i : i + BLOCK]).max() for i in range(0, x.size, BLOCK)])
        values = dynamic_quant_map(signed=signed).astype(np.float64)
        codes = np.searchsorted(middles(signed=signed), normalized(x, absmax), side="left")
        codes -= (x < 0) & (values[codes] == 0)
        codes[np.repeat(absmax, BLOCK)[: x.size] == 0] = 0
        return cls(codes.astype(np.uint8), absmax)

    def values(self, *, signed: bool) -> Array:
        """What the codes stand for."""
        scales = np.repeat(self.absmax, BLOCK)[: self.codes.size]
        return dynamic_quant_map(signed=signed).astype(np.float64)[self.codes] * scales


def middles(*, signed: bool) -> Array:
    """Where one code ends and the next begins, between -1 and 1."""
    values = dynamic_quant_map(signed=signed).astype(np.float64)
    return (values[:-1] + values[1:]) / 2


def normalized(x: Array, absmax: Array) -> Array:
    """Elements over their block's largest magnitude; 0 where that is 0."""
    scales = np.repeat(absmax, BLOCK)[: x.size]
    return np.divide(x, scales, out=np.zeros_like(x), where=scales > 0)


@dataclass
class State:
    """The parameters (n,) and both moments."""

    p: Array
    m: Quantized
    v: Quantized


def step(
    state: State,
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
) -> adamw.State:
    """One step from a summed gradient; returns parameters and moments before these are rounded."""
    m, v = state.m.values(signed=True), state.v.values(signed=False)
    exact = adamw.State(state.p, m, v)
    adamw.step(
        exact, gradient, tokens, t, lr=lr, beta1=beta1, beta2=beta2, epsilon=epsilon,
        weight_decay=weight_decay, max_norm=max_norm,
    )  # fmt: skip
    if tokens:
        state.p = exact.p
        state.m = Quantized.of(exact.m, signed=True)
        state.v = Quantized.of(exact.v, signed=False)
    return exact
