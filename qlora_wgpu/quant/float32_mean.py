"""The mean of float32 numbers with PyTorch's rounding."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_LANES = 8  # floats of an AVX2 register: PyTorch sums with these on every x86 processor
_UNROLL = 4  # registers added to side by side


def float32_mean(values: npt.NDArray[np.float32]) -> np.float32:
    """The mean as PyTorch computes it on one thread of an x86 processor, to the bit.

    Rounding depends on the order of summation, and the offset in a doubly quantized file is such a
    mean, so the order is followed: 8 lanes times 4 registers run down the array, in a cascade of
    four levels that keeps partial sums of similar size (``SumKernel.cpp``). From 32,769 values on,
    PyTorch with several threads cuts the array into as many parts, so that its own result
    depends on the machine; this one is then at most a few units in the last place away.

    Args:
        values: float32 (n,), n >= 1.

    Returns:
        The mean, rounded to float32.
    """
    return np.float32(_sum(values) / np.float32(values.size))


def _sum(values: npt.NDArray[np.float32]) -> np.float32:
    lanes = _LANES if values.size >= _LANES else 1
    registers = values[: values.size // lanes * lanes].reshape(-1, lanes)
    rows = len(registers) // _UNROLL
    unrolled = _cascade(registers[: rows * _UNROLL].reshape(rows, _UNROLL * lanes))
    partial = unrolled.reshape(_UNROLL, lanes)
    total = partial[0]
    for register in registers[rows * _UNROLL :]:
        total = total + register
    for register in partial[1:]:
        total = total + register
    tail = _add_in_order(values[registers.size :, None])
    return np.float32(_add_in_order(np.concatenate([tail, total])[:, None])[0])


def _cascade(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Sums rows in groups of ``step``, those sums in groups of ``step``, and so on, four levels."""
    step = 1 << max(4, max(len(rows) - 1, 0).bit_length() // 4)
    levels = []
    for _ in range(3):
        whole = len(rows) // step * step
        levels.append(_add_in_order(rows[whole:]))
        groups = rows[:whole].reshape(-1, step, rows.shape[1])
        rows = np.add.accumulate(groups, axis=1)[:, -1]
    levels.append(_add_in_order(rows))
    return _add_in_order(np.stack(levels))


def _add_in_order(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The sum over the first axis, strictly one after the other; ``np.sum`` may pair them."""
    if not len(rows):
        return np.zeros(rows.shape[1:], np.float32)
    result: npt.NDArray[np.float32] = np.add.accumulate(rows, axis=0)[-1]
    return result
