"""AltUp's streams; see ``ops.altup`` for how they are arranged."""

from __future__ import annotations

import numpy as np

from qlora_wgpu.reference.tape import Array


def altup_predict(x: Array, others: Array, coefs: Array, active: int) -> tuple[Array, Array]:
    """x_j + Σ_i coefs[j · streams + i] · x_i of every stream j, with coefs (rows, streams²)."""
    streams = _streams(x, others, active)
    count = len(streams)
    made = []
    for j, own in enumerate(streams):
        parts = (coefs[:, j * count + i][:, None] * x_i for i, x_i in enumerate(streams))
        made.append(sum(parts, own))
    return made[active], np.concatenate(made[:active] + made[active + 1 :])


def altup_correct(
    base: Array,
    predicted: Array,
    made: Array,
    gains: Array,
    added: Array | None = None,
    *,
    numbers: list[int],
) -> Array:
    """base_j + (1 + gains[j]) · (made - predicted) (+ added if j > 0) of some streams j."""
    parts = np.split(base, len(numbers)) if len(numbers) > 1 else [base]
    ys = []
    for j, part in zip(numbers, parts, strict=True):
        y = part + (1 + gains[:, j][:, None]) * (made - predicted)
        ys.append(y if added is None or j == 0 else y + added)
    return np.concatenate(ys)


def rms_match(x: Array, like: Array, floor: float, residual: Array | None = None) -> Array:
    """x · √(mean(like²) / max(mean(x²), floor)) (+ residual), over each row."""
    size, wanted = (np.mean(each * each, axis=1, keepdims=True) for each in (x, like))
    y = x * np.sqrt(wanted / np.maximum(size, floor))
    return y if residual is None else y + residual


def _streams(x: Array, others: Array, active: int) -> list[Array]:
    every = list(np.split(others, len(others) // len(x)))
    return [*every[:active], x, *every[active:]]
