"""The short convolution through SiLU: silu(conv(x)), within each sample."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from qlora_wgpu.reference import activation, short_conv

Array = npt.NDArray[np.float64]
Segments = npt.NDArray[np.integer]


def forward(x: Array, weight: Array, bias: Array | float, segments: Segments) -> Array:
    """x (batch · seq, channels), weight (channels, taps), segments (batch, seq)."""
    return activation.forward(short_conv.convolved(x, weight, bias, segments), "silu")


def backward(dy: Array, x: Array, weight: Array, bias: Array | float, segments: Segments) -> Array:
    """Returns dx; weight and bias are frozen."""
    sums = short_conv.convolved(x, weight, bias, segments)
    return short_conv.spread(dy * activation.slope(sums, "silu"), weight, segments)
