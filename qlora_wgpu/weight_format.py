"""The storage format of a quantized matrix: the values of its codes, and its blocks and scales."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import ShapeError

WHOLE = 1 << 30
"""More rows or columns than any matrix has: the size of blocks that span all of them."""


@dataclass(frozen=True, eq=False)
class WeightFormat:
    """The format of a quantized matrix (out_features, in_features), without its bytes.

    With block b of the weight at (row, column), and each product rounded to float32:
    weight = quant_map[code] · scale[b] · factor + minimum[b], or with ``has_zeros``
    weight = (quant_map[code] + minimum[b]) · scale[b].

    Attributes:
        name: The format's usual name, shown to users: "NF4", "Q4_K".
        quant_map: float32 (16,) for 4-bit codes, or (256,) for 8-bit codes.
        blocksize: Weights that share a scale: consecutive ones in row-major order, across rows; or
            the columns of a block, if ``block_rows`` is given.
        nested_blocksize: 8-bit scales that share a scale of their own (double quantization); None
            if scales are float32.
        has_offset: Whether an offset is added to 8-bit scales.
        has_minima: Whether each block has a minimum, stored as its scale is.
        has_zeros: Whether minima are negated zero points, which are added before scaling.
        block_rows: If given, blocks are tiles of ``block_rows`` rows and ``blocksize`` columns,
            numbered row by row; those at the edges may be smaller.
        factor: A last factor of each weight, for formats that round between two products.
    """

    name: str
    quant_map: npt.NDArray[np.float32]
    blocksize: int
    nested_blocksize: int | None = None
    has_offset: bool = False
    has_minima: bool = False
    has_zeros: bool = False
    block_rows: int | None = None
    factor: float = 1.0

    def __post_init__(self) -> None:
        if self.factor != 1.0 and (self.has_offset or self.has_minima or self.bits == 4):
            raise ShapeError(f"{self.name}: a factor with minima or 4 bits is not supported")
        if self.has_zeros and not self.has_minima:
            raise ShapeError(f"{self.name}: has_zeros requires has_minima")
        if self.quant_map.shape not in ((16,), (256,)):
            raise ShapeError(
                f"{self.name}: quant_map must have the shape (16,) or (256,), got "
                f"{self.quant_map.shape}"
            )

    @property
    def bits(self) -> int:
        """Bits per code."""
        return 4 if self.quant_map.size == 16 else 8

    @property
    def per_block(self) -> int:
        """Values per block: the scale and, if there is one, the minimum."""
        return 2 if self.has_minima else 1

    @property
    def key(self) -> tuple[object, ...]:
        """A key that is equal for equal formats."""
        own = (getattr(self, each.name) for each in fields(self))
        return tuple(v.tobytes() if isinstance(v, np.ndarray) else v for v in own)

    def block_count(self, rows: int, columns: int) -> int:
        """Number of blocks of a matrix."""
        if self.block_rows is None:
            return -(-rows * columns // self.blocksize)
        return -(-rows // self.block_rows) * self.blocks_per_row(columns)

    def blocks_per_row(self, columns: int) -> int:
        """Number of blocks next to each other."""
        return -(-columns // self.blocksize)

    def code_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix's codes."""
        return -(-rows * columns * self.bits // 8)

    def scale_entries(self, rows: int, columns: int) -> int:
        """Number of scales and minima of a matrix."""
        return self.per_block * self.block_count(rows, columns)

    def nested_entries(self, rows: int, columns: int) -> int:
        """Number of scales of the scales and minima; 0 if those are float32."""
        if self.nested_blocksize is None:
            return 0
        return self.per_block * -(-self.block_count(rows, columns) // self.nested_blocksize)
