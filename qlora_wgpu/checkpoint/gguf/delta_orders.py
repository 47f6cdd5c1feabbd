"""The order of a gated delta net's heads in llama.cpp's files.

Hugging Face has the heads of values that share a key side by side: of two keys and three values
each, k0v0 k0v1 k0v2 k1v0 k1v1 k1v2. For Qwen 3.5 llama.cpp has them in turns, k0v0 k1v0 k0v1 k1v1
k0v2 k1v2; for Qwen3-Next as Hugging Face, but queries, keys, values and gates each by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Heads:
    """Sizes of a delta net.

    Attributes:
        key_heads: Heads of queries, and of keys.
        value_heads: Heads of values, a multiple of it.
        key_dim: Elements of a query or key.
        value_dim: Elements of a value.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int


def tiled_order(heads: Heads, size: int) -> IntArray:
    """Which of Hugging Face's rows each of llama.cpp's is, where a head of values has ``size``."""
    rows = np.arange(heads.value_heads * size)
    return rows.reshape(heads.key_heads, -1, size).swapaxes(0, 1).reshape(-1)


def qkv_order(heads: Heads) -> IntArray:
    """The same of queries, keys and values in one matrix, and of the convolution's channels."""
    first = 2 * heads.key_heads * heads.key_dim
    return np.concatenate([np.arange(first), first + tiled_order(heads, heads.value_dim)])


def grouped_orders(heads: Heads) -> tuple[IntArray, IntArray]:
    """Qwen3-Next's: the rows of queries, keys and values, and those of gates, of one matrix.

    There what belongs to a head of keys is together: its query, its key, its values, their gates.
    """
    key, value = heads.key_dim, heads.value_heads // heads.key_heads * heads.value_dim
    rows = np.arange(heads.key_heads * (2 * key + 2 * value)).reshape(heads.key_heads, -1)
    q, k, v, z = np.split(rows, np.cumsum([key, key, value]), axis=1)
    return np.concatenate([part.reshape(-1) for part in (q, k, v)]), z.reshape(-1)


def inverse(order: IntArray) -> IntArray:
    """The order that undoes one."""
    return np.argsort(order, kind="stable")
