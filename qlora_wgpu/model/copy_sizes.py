"""How copies of a model's weights are kept for texts on software GPUs, and what they take.

The machine alone decides, not what other programs take of its memory: a text's digits depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass

from qlora_wgpu.gpu.memory_size import SPARE_SHARE, machine_bytes

_MOST_DENSE = 4 << 30  # bytes of linear layers that are kept dequantized
_CODE_BYTES = 0.625  # of a weight as codes, with its part of a float32 scale


@dataclass(frozen=True)
class CopySizes:
    """Copies as they would be.

    Attributes:
        dense: Whether quantized weights are kept dequantized, which is faster.
        nbytes: Bytes of all, more or less.
        fits: Whether the machine has room for them.
    """

    dense: bool
    nbytes: int
    fits: bool


def copy_sizes(head: int, weights: int, item_size: int) -> CopySizes:
    """Dequantized where there is room for that, else as codes.

    Args:
        head: Bytes of the matrix that logits are made with.
        weights: Weights of all linear layers.
        item_size: Bytes of one of them, dequantized.
    """
    most = (machine_bytes() or 0) // SPARE_SHARE
    numbers, codes = item_size * weights, int(_CODE_BYTES * weights)
    dense = numbers <= _MOST_DENSE and head + numbers <= most
    nbytes = head + (numbers if dense else codes)
    return CopySizes(dense, nbytes, nbytes <= most)
