"""The gated delta rule (Yang et al., 2024) token by token, and its backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Segments = npt.NDArray[np.integer]
_EPS = 1e-6


@dataclass(frozen=True)
class Heads:
    """How many heads of which sizes there are; a key head serves neighbouring value heads.

    Attributes:
        keys: Key heads.
        values: Value heads, a multiple of that.
        key_dim: Elements of a head of q and k.
        value_dim: Elements of a head of v.
    """

    keys: int
    values: int
    key_dim: int
    value_dim: int


def forward(
    q: Array, k: Array, v: Array, decay: Array, beta: Array, segments: Segments, heads: Heads
) -> Array:
    """S_t = exp(g_t)·S_{t-1} + k_t ⊗ beta_t·(v_t − (exp(g_t)·S_{t-1})ᵀ k_t) and o_t = S_tᵀ q_t.

    q and k are normalized to length one first, q scaled by 1/√key_dim.

    Args:
        q: (batch · seq, key heads · key_dim).
        k: Like q.
        v: (batch · seq, value heads · value_dim).
        decay: (batch · seq, value heads), g_t.
        beta: Like decay.
        segments: (batch, seq), the sample of each token; 0 for padding, which is passed over.
        heads: Their numbers and sizes.

    Returns:
        o, like v; zero where there is padding.
    """
    o = np.zeros_like(v)
    q, k = _normalized(q, heads) * heads.key_dim**-0.5, _normalized(k, heads)
    for state in _states(k, v, decay, beta, segments, heads):
        row = state.row
        o[row] = np.einsum("hdv,hd->hv", state.after, q[row]).reshape(-1)
    return o


def last_state(
    k: Array, v: Array, decay: Array, beta: Array, segments: Segments, heads: Heads
) -> Array:
    """The state after the last token, (value heads, key_dim, value_dim)."""
    after = np.zeros((heads.values, heads.key_dim, heads.value_dim))
    for state in _states(_normalized(k, heads), v, decay, beta, segments, heads):
        after = state.after
    return after


def backward(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    decay: Array,
    beta: Array,
    segments: Segments,
    heads: Heads,
) -> tuple[Array, Array, Array, Array, Array]:
    """Returns dq, dk, dv, ddecay and dbeta."""
    scale = heads.key_dim**-0.5
    nq, nk = _normalized(q, heads) * scale, _normalized(k, heads)
    dq, dk = np.zeros_like(nq), np.zeros_like(nk)
    dv, ddecay, dbeta = np.zeros_like(v), np.zeros_like(decay), np.zeros_like(beta)
    dstate = np.zeros((heads.values, heads.key_dim, heads.value_dim))
    sequence = -1
    for state in reversed(list(_states(nk, v, decay, beta, segments, heads))):
        row = state.row
        if row // segments.shape[1] != sequence:
            sequence, dstate = row // segments.shape[1], np.zeros_like(dstate)
        dout = do[row].reshape(heads.values, heads.value_dim)
        dq[row] = np.einsum("hdv,hv->hd", state.after, dout)
        dstate = dstate + np.einsum("hd,hv->hdv", nq[row], dout)
        dwritten = np.einsum("hdv,hd->hv", dstate, nk[row])
        derror = beta[row][:, None] * dwritten
        dbeta[row] = np.sum(dwritten * state.error, axis=1)
        dv[row] = derror.reshape(-1)
        dk[row] = np.einsum("hdv,hv->hd", dstate, beta[row][:, None] * state.error)
        dk[row] -= np.einsum("hdv,hv->hd", state.decayed, derror)
        dstate = dstate - np.einsum("hd,hv->hdv", nk[row], derror)
        ddecay[row] = np.sum(dstate * state.decayed, axis=(1, 2))
        dstate = dstate * state.kept[:, None, None]
    return (
        _normalized_backward(_of_keys(dq, heads), q, heads) * scale,
        _normalized_backward(_of_keys(dk, heads), k, heads),
        dv,
        ddecay,
        dbeta,
    )


@dataclass(frozen=True)
class _State:
    """What a token does: ``kept`` · before = ``decayed``, plus k ⊗ beta · ``error`` = ``after``."""

    row: int
    kept: Array
    decayed: Array
    error: Array
    after: Array


def _states(
    k: Array, v: Array, decay: Array, beta: Array, segments: Segments, heads: Heads
) -> Iterator[_State]:
    """The tokens in order, padding left out; k normalized and repeated for every value head."""
    batch, seq = segments.shape
    for b in range(batch):
        state = np.zeros((heads.values, heads.key_dim, heads.value_dim))
        for t in range(seq):
            if segments[b, t] == 0:
                continue
            row = b * seq + t
            begins = t == 0 or segments[b, t] != segments[b, t - 1]
            kept = np.exp(decay[row]) * (not begins)
            decayed = state * kept[:, None, None]
            told = np.einsum("hdv,hd->hv", decayed, k[row])
            error = v[row].reshape(heads.values, heads.value_dim) - told
            state = decayed + np.einsum("hd,hv->hdv", k[row], beta[row][:, None] * error)
            yield _State(row, kept, decayed, error, state)


def _normalized(x: Array, heads: Heads) -> Array:
    """(rows, value heads, key_dim) of heads of length one."""
    x = x.reshape(len(x), heads.keys, heads.key_dim)
    x = x / np.sqrt(np.sum(x * x, axis=2, keepdims=True) + _EPS)
    repeated: Array = np.repeat(x, heads.values // heads.keys, axis=1)
    return repeated


def _of_keys(dx: Array, heads: Heads) -> Array:
    """The sum over the value heads of each key head."""
    group = heads.values // heads.keys
    summed: Array = np.sum(dx.reshape(len(dx), heads.keys, group, heads.key_dim), axis=2)
    return summed


def _normalized_backward(dy: Array, x: Array, heads: Heads) -> Array:
    flat, x = x, x.reshape(dy.shape)
    r = 1 / np.sqrt(np.sum(x * x, axis=2, keepdims=True) + _EPS)
    dx: Array = r * (dy - x * r * r * np.sum(dy * x, axis=2, keepdims=True))
    return dx.reshape(flat.shape)
