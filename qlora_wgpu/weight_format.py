"""How a quantized matrix is stored: what its codes stand for, and which weights share a scale."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import ShapeError

WHOLE = 1 << 30
"""A number of rows or columns that no matrix exceeds: blocks of so many are whole ones."""


@dataclass(frozen=True, eq=False)
class WeightFormat:
    """The form of a quantized matrix (out_features, in_features), known without its bytes.

    With block b of the weight at (row, column), and each product rounded to float32:
    weight = quant_map[code] · scale[b] · factor + minimum[b], or where ``has_zeros``
    weight = (quant_map[code] + minimum[b]) · scale[b].

    Attributes:
        name: As its program calls it, shown to users: "NF4", "Q4_K".
        quant_map: float32 (16,) for codes of 4 bits, or (256,) for codes of 8.
        blocksize: Weights that share a scale: neighbours in row-major order, which may cross rows,
            or ``block_rows`` times as many.
        nested_blocksize: Scales that share one of their own and are codes of 8 bits then; None if
            scales are float32.
        has_offset: Whether a number is added to scales in 8 bits.
        has_minima: Whether each block has a minimum beside its scale, which is stored likewise.
        has_zeros: Whether minima are what zeros take off codes, and scales multiply both.
        block_rows: If given, blocks are tiles of so many rows and ``blocksize`` columns, numbered
            row by row; those at the edges may be smaller.
        factor: A last factor of each weight, for programs that round between two products.
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
            raise ShapeError(f"{self.name}: no kernel has two factors with minima or 4 bits")
        if self.has_zeros and not self.has_minima:
            raise ShapeError(f"{self.name}: zeros are minima, and it has none")
        if self.quant_map.shape not in ((16,), (256,)):
            raise ShapeError(
                f"{self.name}: codes of 4 bits stand for 16 values and those of 8 for 256, not "
                f"for {self.quant_map.shape}"
            )

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4 if self.quant_map.size == 16 else 8

    @property
    def per_block(self) -> int:
        """Numbers that belong to a block: its scale and, if there is one, its minimum."""
        return 2 if self.has_minima else 1

    @property
    def key(self) -> tuple[object, ...]:
        """What is equal for equal formats."""
        own = (getattr(self, each.name) for each in fields(self))
        return tuple(v.tobytes() if isinstance(v, np.ndarray) else v for v in own)

    def block_count(self, rows: int, columns: int) -> int:
        """Number of blocks of a matrix."""
        if self.block_rows is None:
            return -(-rows * columns // self.blocksize)
        return -(-rows // self.block_rows) * self.blocks_per_row(columns)

    def blocks_per_row(self, columns: int) -> int:
        """Number of tiles beside each other."""
        return -(-columns // self.blocksize)

    def code_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix's codes."""
        return -(-rows * columns * self.bits // 8)

    def scale_entries(self, rows: int, columns: int) -> int:
        """Numbers, or codes of numbers, in a matrix's scales and minima."""
        return self.per_block * self.block_count(rows, columns)

    def nested_entries(self, rows: int, columns: int) -> int:
        """Scales of the scales and minima, or 0 if those are float32."""
        if self.nested_blocksize is None:
            return 0
        return self.per_block * -(-self.block_count(rows, columns) // self.nested_blocksize)
