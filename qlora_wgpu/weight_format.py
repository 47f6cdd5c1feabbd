"""How a quantized matrix is stored: the values of its codes, and the blocks that share a scale."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import ShapeError

WHOLE = 1 << 30
"""More rows or columns than any matrix has: blocks of this size are whole rows or matrices."""


@dataclass(frozen=True, eq=False)
class WeightFormat:
    """The format of a quantized matrix (out_features, in_features), known without its bytes.

    For a weight in block b, each product being rounded to float32:
    weight = quant_map[code] · scale[b] · factor + minimum[b], or with ``has_zeros``
    weight = (quant_map[code] + minimum[b]) · scale[b].

    Attributes:
        name: The format's usual name, shown to users: "NF4", "Q4_K".
        quant_map: float32 (16,) for 4-bit codes, or (256,) for 8-bit codes.
        blocksize: Number of weights that share a scale, in row-major order, possibly across rows;
            with ``block_rows``, the number of columns of a tile.
        nested_blocksize: Number of 8-bit scales that share a scale; None if scales are float32.
        has_offset: Whether a number is added to 8-bit scales.
        has_minima: Whether each block has a minimum, stored like its scale.
        has_zeros: Whether the minima are negated zero points, which are multiplied by the scales.
        block_rows: If given, blocks are tiles of this many rows and ``blocksize`` columns, numbered
            row by row; tiles at the edges may be smaller.
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
            raise ShapeError(
                f"{self.name}: a factor is not supported with 4-bit codes, minima or an offset"
            )
        if self.has_zeros and not self.has_minima:
            raise ShapeError(f"{self.name}: has_zeros requires has_minima")
        if self.quant_map.shape not in ((16,), (256,)):
            raise ShapeError(
                f"{self.name}: quant_map must have shape (16,) or (256,), got "
                f"{self.quant_map.shape}"
            )

    @property
    def bits(self) -> int:
        """Bits per code."""
        return 4 if self.quant_map.size == 16 else 8

    @property
    def per_block(self) -> int:
        """Numbers for each block: its scale and, if it has one, its minimum."""
        return 2 if self.has_minima else 1

    @property
    def key(self) -> tuple[object, ...]:
        """A hashable key, equal for equal formats."""
        own = (getattr(self, each.name) for each in fields(self))
        return tuple(v.tobytes() if isinstance(v, np.ndarray) else v for v in own)

    def block_count(self, rows: int, columns: int) -> int:
        """Number of blocks of a matrix."""
        if self.block_rows is None:
            return -(-rows * columns // self.blocksize)
        return -(-rows // self.block_rows) * self.blocks_per_row(columns)

    def blocks_per_row(self, columns: int) -> int:
        """Number of tiles next to each other."""
        return -(-columns // self.blocksize)

    def code_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix's codes."""
        return -(-rows * columns * self.bits // 8)

    def scale_entries(self, rows: int, columns: int) -> int:
        """Number of a matrix's scales and minima."""
        return self.per_block * self.block_count(rows, columns)

    def nested_entries(self, rows: int, columns: int) -> int:
        """Number of scales of the scales and minima; 0 if those are float32."""
        if self.nested_blocksize is None:
            return 0
        return self.per_block * -(-self.block_count(rows, columns) // self.nested_blocksize)
