"""Element-wise formulas, and rows times a scalar."""

import math

import numpy as np

from qlora_wgpu.reference.tape import Array, erfc

Scalars = tuple[float, float, float, float]
_QUICK = 1.702  # of Hugging Face's QuickGELUActivation


def activation(x: Array, name: str) -> Array:
    """SiLU, ReLU, its square, sigmoid, GELU (``gelu``) or a form of it, by Hugging Face's names."""
    if name == "silu":
        y = x * sigmoid(x)
    elif name == "quick_gelu":
        y = x * sigmoid(_QUICK * x)
    elif name == "relu":
        y = np.maximum(x, 0.0)
    elif name == "gelu":
        y = x * (0.5 * erfc(x * (-1 / math.sqrt(2))))
    elif name == "relu2":
        y = np.maximum(x, 0.0) ** 2
    elif name == "sigmoid":
        y = sigmoid(x)
    else:
        y = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return y


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x))."""
    return 1 / (1 + np.exp(-x))


def glu(gate: Array, up: Array, name: str) -> Array:
    """act(gate) · up."""
    return activation(gate, name) * up


def sparse_glu(gate: Array, up: Array, name: str, deviations: float) -> Array:
    """act(max(gate - mean - deviations · std, 0)) · up, with mean and std over each row of gate."""
    centred = gate - np.mean(gate, axis=1, keepdims=True)
    std = np.sqrt(np.mean(centred * centred, axis=1, keepdims=True))
    return activation(np.maximum(centred - deviations * std, 0.0), name) * up


def clamped_glu(gate: Array, up: Array, limit: float, alpha: float) -> Array:
    """gpt-oss's gated unit: (u + 1) · x · σ(alpha · x), with gate and up clamped to x and u."""
    x = np.minimum(gate, limit)
    return (np.clip(up, -limit, limit) + 1) * x * sigmoid(alpha * x)


def clip(x: Array, limit: float) -> Array:
    """clamp(x, -limit, limit); its derivative at the limits is one."""
    return np.clip(x, -limit, limit)


def row_gate(x: Array, gate: Array) -> Array:
    """sigmoid(gate) · x, with x (rows, columns) and gate (rows, 1)."""
    return sigmoid(gate) * x


def xielu(x: Array, scalars: Scalars) -> Array:
    """xIELU (Huang & Schlag, 2024); scalars are (alpha_p, alpha_n, beta, eps).

    p · x² + β · x for x > 0, else n · (exp(min(x, eps)) - 1 - x) + β · x.
    """
    alpha_p, alpha_n, beta, eps = scalars
    p, n = float(np.logaddexp(0, alpha_p)), float(beta + np.logaddexp(0, alpha_n))
    below = np.where(x < eps, np.expm1(np.minimum(x, eps)), np.expm1(eps)) - x
    return np.where(x > 0, p * x * x, n * below) + beta * x


def scaled(x: Array, scalar: float) -> Array:
    """s · x."""
    return scalar * x


def weighted_sum(x: Array, z: Array, a: float, b: float) -> Array:
    """a · x + b · z."""
    return a * x + b * z


def clamped(x: Array, lowest: float, highest: float) -> Array:
    """x between two numbers."""
    return np.minimum(np.maximum(x, lowest), highest)


def standardized(x: Array, bias: Array, scale: Array, factor: float) -> Array:
    """(factor · x - bias) · scale by column."""
    return (factor * x - bias) * scale


def column_scale(x: Array, factors: Array) -> Array:
    """x (rows, columns) times a factor of each column."""
    return x * factors
