"""Starts of A and B that are parts of the weight they stand beside: PEFT's PiSSA and OLoRA.

The base keeps the rest, W - s·B·A, so that the model is what it was, and what is trained are the
directions in which the weight is largest (PiSSA, arXiv 2404.02948), or its first orthogonal ones
(OLoRA, arXiv 2406.01775). Computed on the host, in float32 as PEFT does.
"""

from __future__ import annotations

import re
import zlib

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]

_NITER = re.compile(r"pissa_niter_(\d+)")
_ROWS = 1 << 22  # numbers of a product in float64 at a time


def pair_of(
    name: str, weight: Float32Array, kind: str, r: int, scaling: float, seed: int
) -> tuple[Float32Array, Float32Array]:
    """A (r, in_features) and B (out_features, r) of a layer.

    Args:
        name: The layer's, whose random numbers are its own.
        weight: (out_features, in_features).
        kind: ``pissa``, ``pissa_niter_N`` or ``olora``.
        r: The rank, at most the smaller side of the weight.
        scaling: Factor of B·A.
        seed: Of the random numbers of ``pissa_niter_N``.
    """
    if kind == "olora":
        # The first columns of Q depend on those of the weight alone, and R's rows are Qᵀ·W.
        q, _ = np.linalg.qr(weight[:, :r])
        return np.ascontiguousarray(q.T @ weight), np.ascontiguousarray(q)
    if match := _NITER.fullmatch(kind):
        stream = np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(name.encode())]))
        u, s, vt = _svd_lowrank(weight, r, int(match[1]), stream)
    else:
        u, s, vt = (part.astype(np.float32) for part in np.linalg.svd(weight, full_matrices=False))
    root = np.sqrt(s[:r] / np.float32(scaling))
    return np.ascontiguousarray(root[:, None] * vt[:r]), np.ascontiguousarray(u[:, :r] * root)


def rest_of(weight: Float32Array, a: Float32Array, b: Float32Array, scaling: float) -> Float32Array:
    """W - scaling · B·A, each sum rounded once, so that it does not depend on their order."""
    rest = np.empty_like(weight)
    step = max(_ROWS // weight.shape[1], 1)
    wide = scaling * a.astype(np.float64)
    for begin in range(0, len(weight), step):
        rows = slice(begin, begin + step)
        rest[rows] = weight[rows] - b[rows].astype(np.float64) @ wide
    return rest


def _svd_lowrank(
    weight: Float32Array, r: int, niter: int, random: np.random.Generator
) -> tuple[Float32Array, Float32Array, Float32Array]:
    """The r largest singular values, nearly: Halko et al. (2009), algorithm 5.1, as PyTorch has it.

    Returns:
        U (out, r), S (r) and Vᵀ (r, in).
    """
    is_wide = weight.shape[0] < weight.shape[1]
    matrix = weight.T if is_wide else weight
    basis = random.standard_normal((matrix.shape[1], r), dtype=np.float32)
    q, _ = np.linalg.qr(matrix @ basis)
    for _ in range(niter):
        q, _ = np.linalg.qr(matrix.T @ q)
        q, _ = np.linalg.qr(matrix @ q)
    u, s, vt = np.linalg.svd(q.T @ matrix, full_matrices=False)
    u = q @ u
    return (vt.T, s, u.T) if is_wide else (u, s, vt)
