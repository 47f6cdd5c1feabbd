"""Delta nets (Yang et al., 2024) token by token: convolution, gates and delta rule."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qlora_wgpu.reference.pointwise import activation, sigmoid
from qlora_wgpu.reference.tape import Array

Segments = npt.NDArray[np.integer]
_EPS = 1e-6


@dataclass(frozen=True)
class Heads:
    """Numbers and sizes of heads; neighbouring value heads share a key head."""

    keys: int
    values: int  # a multiple of ``keys``
    key_dim: int
    value_dim: int


def convolved(x: Array, weight: Array, bias: Array | None, segments: Segments) -> Array:
    """bias + Σ_j weight[:, -1 - j] · x[t - j], each over the rows of its sample.

    x (batch · seq, channels), weight (channels, taps), segments (batch, seq).
    """
    rows = np.arange(segments.size).reshape(segments.shape)
    y = np.zeros(x.shape) if bias is None else bias + np.zeros(x.shape)
    for j in range(min(weight.shape[1], segments.shape[1])):
        earlier, same = np.roll(rows, j, axis=1), segments == np.roll(segments, j, axis=1)
        same[:, :j] = False
        y = y + np.where(same.reshape(-1, 1), weight[:, -1 - j] * x[earlier.reshape(-1)], 0.0)
    return y


def causal_conv(x: Array, weight: Array, bias: Array | None, segments: Segments) -> Array:
    """silu(conv(x)); see ``convolved``."""
    return activation(convolved(x, weight, bias, segments), "silu")


def short_conv(x: Array, weight: Array, bias: Array | None, segments: Segments) -> Array:
    """C · conv(B · v) of x = [B | C | v], (batch · seq, 3 · hidden); see ``convolved``."""
    gate_in, gate_out, value = np.split(x, 3, axis=1)
    return gate_out * convolved(gate_in * value, weight, bias, segments)


def gated_delta_gates(
    a: Array, b: Array, a_log: Array, dt_bias: Array, largest: float = 1.0
) -> tuple[Array, Array]:
    """decay = -exp(a_log) · softplus(a + dt_bias) and beta = largest · sigmoid(b).

    a and b (rows, heads), a_log and dt_bias (heads).
    """
    return -np.exp(a_log) * np.logaddexp(0.0, a + dt_bias), largest * sigmoid(b)


def gated_delta_rule(
    q: Array, k: Array, v: Array, decay: Array, beta: Array, segments: Segments, heads: Heads
) -> Array:
    """S_t = exp(g_t)·S_{t-1} + k_t ⊗ beta_t·(v_t − (exp(g_t)·S_{t-1})ᵀ k_t) and o_t = S_tᵀ q_t.

    q and k (batch · seq, key heads · key_dim) are normalized to length one first, q scaled by
    1/√key_dim; v is (batch · seq, value heads · value_dim), decay g_t and beta (batch · seq, value
    heads); padding, where segments (batch, seq) are 0, is skipped.
    """
    q = _normalized(q, heads) * heads.key_dim**-0.5
    states, nothing = _states(k, v, decay, beta, segments, heads), np.zeros(v.shape[1])
    return np.stack([
        nothing if state is None else np.einsum("hdv,hd->hv", state, q[row]).reshape(-1)
        for row, state in enumerate(states)
    ])  # fmt: skip


def last_state(
    k: Array, v: Array, decay: Array, beta: Array, segments: Segments, heads: Heads
) -> Array:
    """The state after the last token, (value heads, key_dim, value_dim)."""
    states = _states(k, v, decay, beta, segments, heads)
    return next(state for state in reversed(states) if state is not None)


def _states(
    k: Array, v: Array, decay: Array, beta: Array, segments: Segments, heads: Heads
) -> list[Array | None]:
    k, seq = _normalized(k, heads), segments.shape[1]
    states = list[Array | None]()
    for row, segment in enumerate(segments.reshape(-1)):
        if segment == 0:
            states.append(None)
            continue
        state = np.zeros((heads.values, heads.key_dim, heads.value_dim))
        if row % seq and segment == segments[row // seq, row % seq - 1]:
            assert states[-1] is not None
            state = states[-1] * np.exp(decay[row]).reshape(-1, 1, 1)
        recalled = np.einsum("hdv,hd->hv", state, k[row])
        error = beta[row].reshape(-1, 1) * (v[row].reshape(recalled.shape) - recalled)
        states.append(state + np.einsum("hd,hv->hdv", k[row], error))
    return states


def _normalized(x: Array, heads: Heads) -> Array:
    """Heads normalized to length one, (rows, value heads, key_dim)."""
    x = x.reshape(len(x), heads.keys, heads.key_dim)
    x = x / np.sqrt(np.sum(x * x, axis=2, keepdims=True) + _EPS)
    return np.repeat(x, heads.values // heads.keys, axis=1)
