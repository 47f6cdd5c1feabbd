"""Mamba 2 (Dao & Gu, 2024), token by token."""

import numpy as np

from qlora_wgpu.reference.delta_net import Segments
from qlora_wgpu.reference.norms import rms_norm
from qlora_wgpu.reference.pointwise import activation
from qlora_wgpu.reference.tape import Array


def mamba_steps(raw: Array, bias: Array, limits: tuple[float, float | None]) -> Array:
    """softplus(raw + bias) within the limits; raw (rows, heads), bias (heads)."""
    high = np.inf if limits[1] is None else limits[1]
    return np.clip(np.logaddexp(0.0, raw + bias), limits[0], high)


def mamba_scan(
    x: Array, bc: Array, dt: Array, a_log: Array, d: Array, segments: Segments, state_size: int
) -> Array:
    """S_t = exp(dt_t·A)·S_{t-1} + B_t ⊗ dt_t·x_t and y_t = S_tᵀ C_t + D·x_t, A = -exp(a_log).

    x (batch · seq, heads · head_dim), bc (batch · seq, 2 · groups · state_size), dt (batch · seq,
    heads), a_log and d (heads); padding, where segments (batch, seq) are 0, is skipped.
    """
    heads, seq = a_log.size, segments.shape[1]
    x = x.reshape(x.shape[0], heads, -1)
    bc = bc.reshape(x.shape[0], -1, state_size)
    groups = bc.shape[1] // 2
    b, c = (np.repeat(bc[:, part], heads // groups, axis=1) for part in (
        slice(0, groups), slice(groups, 2 * groups)
    ))  # fmt: skip
    ys, state = list[Array](), np.zeros((heads, state_size, x.shape[2]))
    for row, segment in enumerate(segments.reshape(-1)):
        if segment == 0:
            ys.append(np.zeros(heads * x.shape[2]))
            continue
        written = np.einsum("hn,hp->hnp", b[row], dt[row].reshape(-1, 1) * x[row])
        if row % seq and segment == segments[row // seq, row % seq - 1]:
            decay = np.exp(-np.exp(a_log) * dt[row])
            written = written + decay.reshape(-1, 1, 1) * state
        state = written
        y = np.einsum("hnp,hn->hp", state, c[row]) + d.reshape(-1, 1) * x[row]
        ys.append(y.reshape(-1))
    return np.stack(ys)


def gated_group_norm(
    x: Array, z: Array, weight: Array, eps: float, groups: int, *, gate_first: bool
) -> Array:
    """RMSNorm over each group of columns: of x · silu(z), or of x, and then times silu(z)."""
    gate = activation(z, "silu")
    v = x * gate if gate_first else x
    weights = np.tile(weight.reshape(groups, -1), (len(x), 1))
    y = rms_norm(v.reshape(weights.shape), weights, eps).reshape(x.shape)
    return y if gate_first else y * gate
