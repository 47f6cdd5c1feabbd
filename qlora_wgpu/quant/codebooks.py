"""The values that 4-bit and 8-bit codes stand for."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

NF4_QUANT_MAP: npt.NDArray[np.float32] = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)
"""The 16 quantiles of 4-bit NormalFloat (Dettmers et al., QLoRA, arXiv:2305.14314)."""
NF4_QUANT_MAP.flags.writeable = False


@cache
def dynamic_quant_map(*, signed: bool = True) -> npt.NDArray[np.float32]:
    """The 256 sorted values of bitsandbytes' dynamic type, in which it stores absmax and moments.

    For i = 0..6 they are ±10^(i-6) times the 2^i midpoints of 2^i + 1 even steps from 0.1 to 1,
    plus 0 and 1 (Dettmers, 8-Bit Approximations for Parallelism in Deep Learning,
    arXiv:1511.04561); without signs, twice as many steps. Every step is rounded to float32 as
    PyTorch rounds it, so that the bits agree with bitsandbytes' own map.

    Args:
        signed: Whether there are negative values.

    Returns:
        float32 (256,), read-only.
    """
    values = [np.zeros(1, np.float32), np.ones(1, np.float32)]
    for i in range(7):
        edges = _linspace(0.1, 1.0, 2 ** (i if signed else i + 1) + 1)
        midpoints = (edges[:-1] + edges[1:]) / np.float32(2)
        magnitudes = np.float32(10.0 ** (i - 6)) * midpoints
        values += [magnitudes, -magnitudes] if signed else [magnitudes]
    result = np.sort(np.concatenate(values))
    result.flags.writeable = False
    return result


def _linspace(start: float, stop: float, count: int) -> npt.NDArray[np.float32]:
    """PyTorch's float32 linspace, by fused multiply-adds: counted from either end to the middle."""
    first, last = np.float32(start), np.float32(stop)
    step = float((last - first) / np.float32(count - 1))
    index = np.arange(count)
    from_first = float(first) + step * index
    from_last = float(last) - step * (count - 1 - index)
    return np.where(index < count // 2, from_first, from_last).astype(np.float32)
