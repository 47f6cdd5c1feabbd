"""The gates of Gated DeltaNet: decay = -exp(a_log) · softplus(a + dt_bias), beta = sigmoid(b)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from qlora_wgpu.reference import activation

Array = npt.NDArray[np.float64]


def forward(a: Array, b: Array, a_log: Array, dt_bias: Array) -> tuple[Array, Array]:
    """a and b (rows, heads), a_log and dt_bias (heads); returns decay and beta."""
    return -np.exp(a_log) * np.logaddexp(0.0, a + dt_bias), activation.forward(b, "sigmoid")


def backward(
    ddecay: Array, dbeta: Array, a: Array, b: Array, a_log: Array, dt_bias: Array
) -> tuple[Array, Array]:
    """Returns da and db; a_log and dt_bias are frozen."""
    da = -ddecay * np.exp(a_log) * activation.forward(a + dt_bias, "sigmoid")
    return da, dbeta * activation.slope(b, "sigmoid")
