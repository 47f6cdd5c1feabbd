"""A quantized weight matrix with its codes and scales, and what it stands for in NumPy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import ShapeError
from qlora_wgpu.quant.double_quant import NESTED_BLOCKSIZE, dequantize_absmax
from qlora_wgpu.weight_format import WHOLE, WeightFormat

_CHUNK = 65536  # bytes of codes worked on at a time: temporaries that stay in the cache

UInt8Array = npt.NDArray[np.uint8]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A matrix of n = out_features · in_features weights in nb blocks, in bitsandbytes' layout.

    Where blocks have minima, scales and minima take turns: ``absmax`` is (nb, 2), and so is
    ``nested_absmax``.

    Attributes:
        shape: (out_features, in_features).
        codes: uint8: two 4-bit codes a byte, the even weight in the high nibble, (ceil(n / 2),), or
            one of 8 bits, (n,). Rows follow each other without a gap.
        quant_map: float32 (16,) or (256,), the value of each code.
        blocksize: Weights per block.
        absmax: Scale of each block: float32 (nb,), or uint8 codes if doubly quantized.
        nested_absmax: float32 (ceil(nb / nested_blocksize),), or None if not doubly quantized.
        nested_quant_map: float32 (256,), the value of each absmax code, or None likewise.
        nested_offset: A float32 number added to each dequantized scale, or None if there is none.
        nested_blocksize: Scales per nested block.
        dtype: Type of the weights before, as PyTorch calls it, for example "bfloat16".
        name: Of the format, for messages.
        block_rows: Rows of a tile, where blocks are tiles (``WeightFormat``).
        factor: The last factor of each weight.
        has_zeros: Whether scales multiply minima, too (``WeightFormat``).
    """

    shape: tuple[int, int]
    codes: UInt8Array
    quant_map: Float32Array
    blocksize: int
    absmax: Float32Array | UInt8Array
    nested_absmax: Float32Array | None = None
    nested_quant_map: Float32Array | None = None
    nested_offset: float | None = None
    nested_blocksize: int = NESTED_BLOCKSIZE
    dtype: str = "float32"
    name: str = "NF4"
    block_rows: int | None = None
    factor: float = 1.0
    has_zeros: bool = False

    @property
    def format(self) -> WeightFormat:
        """How it is stored."""
        return WeightFormat(
            name=self.name,
            quant_map=self.quant_map,
            blocksize=self.blocksize,
            nested_blocksize=self.nested_blocksize if self.double_quant else None,
            has_offset=self.double_quant and self.nested_offset is not None,
            has_minima=self.absmax.ndim == 2,
            has_zeros=self.has_zeros,
            block_rows=self.block_rows,
            factor=self.factor,
        )

    @property
    def double_quant(self) -> bool:
        """Whether the scales are stored in 8 bits."""
        return self.nested_absmax is not None

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = (self.codes, self.quant_map, self.absmax)
        nested = (self.nested_absmax, self.nested_quant_map)
        return sum(a.nbytes for a in arrays) + sum(a.nbytes for a in nested if a is not None)

    def block_scales(self) -> Float32Array:
        """The scale of each block, dequantized: float32 (nb,), or with minima (nb, 2)."""
        if self.nested_absmax is None or self.nested_quant_map is None:
            return self.absmax.astype(np.float32)
        codes = self.absmax.astype(np.uint8, copy=False)
        if self.nested_offset is not None:
            return dequantize_absmax(
                codes,
                self.nested_absmax,
                self.nested_quant_map,
                np.float32(self.nested_offset),
                self.nested_blocksize,
            )
        nested = np.arange(len(codes)) // self.nested_blocksize
        scales: Float32Array = self.nested_quant_map[codes] * self.nested_absmax[nested]
        return scales

    def dequantize(self) -> Float32Array:
        """The weights, ``quant_map[code] · scale`` in float32 (not cast to ``dtype``).

        Returns:
            float32 (out_features, in_features).
        """
        weight = self._values()
        scales = self.block_scales()
        if self.block_rows is not None:
            return self._in_tiles(weight.reshape(self.shape), scales)
        n = weight.size
        whole = n // self.blocksize * self.blocksize
        blocks, rest = weight[:whole].reshape(-1, self.blocksize), weight[whole:]
        self._scale(blocks, scales[: len(blocks), None])
        if rest.size:
            self._scale(rest, scales[-1])
        return weight.reshape(self.shape)

    def take_rows(self, order: npt.NDArray[np.integer[Any]]) -> QuantizedWeight:
        """Some rows, in another order, of a matrix whose blocks are parts of rows.

        Args:
            order: The numbers of the rows to take.

        Raises:
            ShapeError: If a block holds weights of several rows.
        """
        columns, form = self.shape[1], self.format
        blocks = columns // self.blocksize
        nested = self.nested_absmax
        whole = nested is None or self.nested_blocksize == WHOLE
        if (
            self.block_rows is not None
            or columns % self.blocksize
            or columns * form.bits % 8
            or not (whole or blocks % self.nested_blocksize == 0)
        ):
            raise ShapeError(f"{self.name} of shape {self.shape}: blocks cross rows")

        def taken(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
            by_row = array.reshape(self.shape[0], -1, *array.shape[1:])
            rows: npt.NDArray[Any] = by_row[order]
            return rows.reshape(-1, *array.shape[1:])

        return replace(
            self,
            shape=(len(order), columns),
            codes=taken(self.codes),
            absmax=taken(self.absmax),
            nested_absmax=nested if nested is None or whole else taken(nested),
        )

    def _values(self) -> Float32Array:
        """What each code stands for: float32 (n,)."""
        n = self.shape[0] * self.shape[1]
        if self.quant_map.size == 256:
            return self.quant_map[self.codes[:n]]
        values = np.empty(2 * self.codes.size, np.float32)
        _decode(self.codes, self.quant_map, values)
        return values[:n]

    def _in_tiles(self, weight: Float32Array, scales: Float32Array) -> Float32Array:
        rows, columns = self.shape
        assert self.block_rows is not None
        across = self.format.blocks_per_row(columns)
        for number, row in enumerate(range(0, rows, self.block_rows)):
            tiles = scales[number * across : (number + 1) * across]
            for column, scale in zip(range(0, columns, self.blocksize), tiles, strict=True):
                tile = weight[row : row + self.block_rows, column : column + self.blocksize]
                self._scale(tile, scale)
        return weight

    def _scale(self, values: Float32Array, scales: Float32Array) -> None:
        """Makes weights of values, in place, with scales (…) or scales and minima (…, 2)."""
        minima = None
        if self.absmax.ndim == 2:
            scales, minima = scales[..., 0], scales[..., 1]
        if minima is not None and self.has_zeros:
            values += minima
            minima = None
        values *= scales
        if self.factor != 1.0:
            values *= np.float32(self.factor)
        if minima is not None:
            values += minima


def pack_nibbles(codes: UInt8Array) -> UInt8Array:
    """Codes of 4 bits, two a byte, the even one in the high nibble; an odd last one is padded."""
    flat = codes.reshape(-1)
    if flat.size % 2:
        flat = np.pad(flat, (0, 1))
    return flat[0::2] << np.uint8(4) | flat[1::2]


def _decode(codes: UInt8Array, quant_map: Float32Array, out: Float32Array) -> None:
    """Writes the two values of each byte, looked up as one pair of 8 bytes."""
    byte = np.arange(256)
    pairs = np.stack([quant_map[byte >> 4], quant_map[byte & 15]], axis=1).view(np.uint64)[:, 0]
    target = out.view(np.uint64)
    for start in range(0, codes.size, _CHUNK):
        chunk = slice(start, start + _CHUNK)
        np.take(pairs, codes[chunk], out=target[chunk], mode="clip")
