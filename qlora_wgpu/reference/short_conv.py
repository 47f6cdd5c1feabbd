"""The gated short convolution: C · conv(B · v) of x = [B | C | v], within each sample."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Segments = npt.NDArray[np.integer]


def forward(x: Array, weight: Array, bias: Array | float, segments: Segments) -> Array:
    """x (batch · seq, 3 · hidden), weight (hidden, taps), segments (batch, seq)."""
    gate_in, gate_out, value = np.split(x, 3, axis=1)
    return gate_out * convolved(gate_in * value, weight, bias, segments)


def backward(dy: Array, x: Array, weight: Array, bias: Array | float, segments: Segments) -> Array:
    """Returns dx; weight and bias are frozen."""
    gate_in, gate_out, value = np.split(x, 3, axis=1)
    dgate_out = dy * convolved(gate_in * value, weight, bias, segments)
    du = spread(dy * gate_out, weight, segments)
    return np.concatenate([du * value, dgate_out, du * gate_in], axis=1)


def spread(ds: Array, weight: Array, segments: Segments) -> Array:
    """The gradient of what was ``convolved``."""
    du = np.zeros_like(ds)
    for j, (later, earlier) in _pairs(segments, weight.shape[1]):
        du[earlier] += weight[:, -1 - j] * ds[later]
    return du


def convolved(u: Array, weight: Array, bias: Array | float, segments: Segments) -> Array:
    """bias + Σ_j weight[:, -1 - j] · u[t - j], each over the rows of its sample."""
    y = np.zeros_like(u) + bias
    for j, (later, earlier) in _pairs(segments, weight.shape[1]):
        y[later] += weight[:, -1 - j] * u[earlier]
    return y


def _pairs(segments: Segments, taps: int) -> list[tuple[int, tuple[Segments, Segments]]]:
    """For each distance, the rows of tokens of one sample that lie so far apart."""
    rows = np.arange(segments.size).reshape(segments.shape)
    pairs = []
    for j in range(min(taps, segments.shape[1])):
        stop = segments.shape[1] - j
        same = segments[:, j:] == segments[:, :stop]
        pairs.append((j, (rows[:, j:][same], rows[:, :stop][same])))
    return pairs
