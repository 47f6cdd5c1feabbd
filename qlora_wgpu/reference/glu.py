"""Gated linear units: y = act(gate) · up, with SiLU or GELU."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from qlora_wgpu.reference import activation as activations

Array = npt.NDArray[np.float64]


def forward(gate: Array, up: Array, activation: str) -> Array:
    """gate and up (rows, columns)."""
    return activations.forward(gate, activation) * up


def backward(dy: Array, gate: Array, up: Array, activation: str) -> tuple[Array, Array]:
    """Returns dgate and dup."""
    dgate = dy * up * activations.slope(gate, activation)
    return dgate, dy * activations.forward(gate, activation)
