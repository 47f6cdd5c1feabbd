"""The summed next-token loss of labelled rows, through ``lm_head``."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from qlora_wgpu.labels import IGNORE_INDEX

Array = npt.NDArray[np.float64]


def forward(
    hidden: Array,
    head: Array,
    targets: npt.NDArray[np.integer],
    scale: float = 1.0,
    softcap: float | None = None,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> float:
    """hidden (rows, columns), head (vocab, columns), targets (rows), -100 to ignore."""
    return float(losses(hidden, head, targets, scale, softcap, smoothing, z_loss).sum())


def losses(
    hidden: Array,
    head: Array,
    targets: npt.NDArray[np.integer],
    scale: float = 1.0,
    softcap: float | None = None,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Array:
    """The loss of each row that has a target; arguments as for ``forward``."""
    rows = np.flatnonzero(targets != IGNORE_INDEX)
    logits, _ = _logits(hidden[rows], head, scale, softcap)
    top = logits.max(axis=1, keepdims=True) if len(rows) else np.zeros((0, 1))
    lse = top[:, 0] + np.log(np.exp(logits - top).sum(axis=1))
    hit = logits[np.arange(len(rows)), targets[rows]]
    target_logit = (1 - smoothing) * hit + smoothing * logits.mean(axis=1)
    result: Array = lse - target_logit + z_loss * lse**2
    return result


def correct(
    hidden: Array,
    head: Array,
    targets: npt.NDArray[np.integer],
    scale: float = 1.0,
    softcap: float | None = None,
) -> int:
    """The number of hits; arguments as for ``forward``."""
    return int(hits(hidden, head, targets, scale, softcap).sum())


def hits(
    hidden: Array,
    head: Array,
    targets: npt.NDArray[np.integer],
    scale: float = 1.0,
    softcap: float | None = None,
) -> npt.NDArray[np.bool_]:
    """Whether each row's target has the largest logit, the first of those that are as large."""
    rows = np.flatnonzero(targets != IGNORE_INDEX)
    logits, _ = _logits(hidden[rows], head, scale, softcap)
    found: npt.NDArray[np.bool_] = logits.argmax(axis=1) == targets[rows]
    return found


def backward(
    hidden: Array,
    head: Array,
    targets: npt.NDArray[np.integer],
    scale: float = 1.0,
    softcap: float | None = None,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    factors: Array | None = None,
) -> Array:
    """Returns d (factors · losses) / d hidden (rows, columns); a factor for each row with a target.

    Factors are ones by default, and constants: no gradient passes through them.
    """
    dlogits = logits_gradient(hidden, head, targets, scale, softcap, smoothing, z_loss, factors)
    return dlogits @ head * scale


def logits_gradient(
    hidden: Array,
    head: Array,
    targets: npt.NDArray[np.integer],
    scale: float = 1.0,
    softcap: float | None = None,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    factors: Array | None = None,
) -> Array:
    """Returns d (factors · losses) / d (scale · hidden · headᵀ) (rows, vocab); see ``backward``."""
    rows = np.flatnonzero(targets != IGNORE_INDEX)
    gradient = np.zeros((len(hidden), len(head)))
    if len(rows):
        logits, slope = _logits(hidden[rows], head, scale, softcap)
        top = logits.max(axis=1, keepdims=True)
        e = np.exp(logits - top)
        total = e.sum(axis=1, keepdims=True)
        dlogits = e / total * (1 + 2 * z_loss * (top + np.log(total)))
        dlogits -= smoothing / logits.shape[1]
        dlogits[np.arange(len(rows)), targets[rows]] -= 1 - smoothing
        given = np.ones(len(rows)) if factors is None else factors
        gradient[rows] = given[:, None] * (dlogits * slope)
    return gradient


def _logits(hidden: Array, head: Array, scale: float, softcap: float | None) -> tuple[Array, Array]:
    logits = scale * (hidden @ head.T)
    if softcap is None:
        return logits, np.ones_like(logits)
    bent = np.tanh(logits / softcap)
    return softcap * bent, 1 - bent**2
