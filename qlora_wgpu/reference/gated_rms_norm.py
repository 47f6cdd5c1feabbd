"""RMSNorm of every head by itself, times a gate: x · rstd · weight · silu(z)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from qlora_wgpu.reference import activation, rms_norm

Array = npt.NDArray[np.float64]


def forward(x: Array, z: Array, weight: Array, eps: float) -> Array:
    """x and z (rows, heads · head_dim), weight (head_dim)."""
    heads = x.reshape(-1, weight.size)
    return rms_norm.forward(heads, weight, eps).reshape(x.shape) * activation.forward(z, "silu")


def backward(dy: Array, x: Array, z: Array, weight: Array, eps: float) -> tuple[Array, Array]:
    """Returns dx and dz; weight is frozen."""
    heads = x.reshape(-1, weight.size)
    dnorm = (dy * activation.forward(z, "silu")).reshape(heads.shape)
    dx = rms_norm.backward(dnorm, heads, weight, eps).reshape(x.shape)
    norm = rms_norm.forward(heads, weight, eps).reshape(x.shape)
    return dx, dy * norm * activation.slope(z, "silu")
