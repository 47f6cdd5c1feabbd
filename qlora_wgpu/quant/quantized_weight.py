"""Quantized matrices in NumPy: codebooks, scales (also quantized), and dequantization."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import ml_dtypes
import numpy as np
import numpy.typing as npt

from qlora_wgpu.weight_format import WeightFormat

Float32Array = npt.NDArray[np.float32]


def _fixed(values: npt.ArrayLike) -> Float32Array:
    array = np.array(values, np.float32)
    array.flags.writeable = False
    return array


_BYTES = np.arange(256, dtype=np.uint8)

NIBBLES: Float32Array = _fixed(np.arange(16))
"""Unsigned integers of 4 bits."""
UNSIGNED: Float32Array = _fixed(np.arange(256))
"""Unsigned integers of 8 bits."""
SIGNED: Float32Array = _fixed(_BYTES.view(np.int8))
"""Integers of 8 bits in two's complement."""
E2M1: Float32Array = _fixed(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
)
"""Floats of 4 bits: MXFP4's and NVFP4's elements (OCP Microscaling Formats 1.0, section 5.3.3)."""
E4M3: Float32Array = _fixed(_BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32))
"""8-bit floats with the maximum 448 and no infinity (Micikevicius et al., arXiv:2209.05433)."""
E5M2: Float32Array = _fixed(_BYTES.view(ml_dtypes.float8_e5m2).astype(np.float32))
"""Floats of 8 bits with float16's exponents."""
E8M0: Float32Array = _fixed([*np.ldexp(1.0, np.arange(255) - 127), np.nan])
"""Powers of two of 8 bits, MXFP4's scales (OCP Microscaling Formats 1.0, section 5.4.1)."""
IQ4_VALUES: Float32Array = _fixed(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
)
"""The values of ggml's IQ4_NL and IQ4_XS."""


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
    """The 256 sorted values of bitsandbytes' dynamic type, used for absmax and moments.

    For i = 0..6 they are ±10^(i-6) times the 2^i midpoints of 2^i + 1 even steps from 0.1 to 1,
    plus 0 and 1 (Dettmers, 8-Bit Approximations for Parallelism in Deep Learning,
    arXiv:1511.04561); without signs, twice as many steps. Every step is rounded to float32 as in
    PyTorch, so that the result is bit-identical to bitsandbytes' map. It is read-only.
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
    """PyTorch's float32 linspace, with fused multiply-adds from both ends to the middle."""
    first, last = np.float32(start), np.float32(stop)
    step = float((last - first) / np.float32(count - 1))
    index = np.arange(count)
    from_first = float(first) + step * index
    from_last = float(last) - step * (count - 1 - index)
    return np.where(index < count // 2, from_first, from_last).astype(np.float32)


_LANES = 8  # floats per AVX2 register, which PyTorch uses for sums on all x86 processors
_UNROLL = 4  # registers accumulated in parallel


def float32_mean(values: npt.NDArray[np.float32]) -> np.float32:
    """The float32 mean, bit-identical to PyTorch's on one thread of an x86 processor.

    Rounding depends on the order of summation, and the offset in a double-quantized file is such a
    mean, so this uses the same order: 8 lanes times 4 registers run down the array, in a cascade of
    four levels with partial sums of similar size (``SumKernel.cpp``). From 32,769 values on,
    PyTorch with several threads splits the array into as many parts, so its result depends on the
    machine; this one then differs by at most a few units in the last place.
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
    """Sums rows in groups of ``step``, these sums in groups of ``step``, and so on, four levels."""
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
    """The sum over the first axis, strictly in order; ``np.sum`` may use pairs."""
    if not len(rows):
        return np.zeros(rows.shape[1:], np.float32)
    result: npt.NDArray[np.float32] = np.add.accumulate(rows, axis=0)[-1]
    return result


NESTED_BLOCKSIZE = 256


@dataclass(frozen=True)
class QuantizedAbsmax:
    """Scales as in bitsandbytes with ``compress_statistics``."""

    codes: npt.NDArray[np.uint8]  # uint8 (n,), codes of ``dynamic_quant_map``
    # float32 (ceil(n / 256),), the scale of each block of 256 scales.
    nested_absmax: npt.NDArray[np.float32]
    nested_offset: np.float32  # the mean of all scales, subtracted before quantization


def quantize_absmax(absmax: npt.NDArray[np.float32]) -> QuantizedAbsmax:
    """Quantizes finite float32 scales to 8 bits, bit-exact to bitsandbytes 0.50 on a CPU."""
    offset = float32_mean(absmax)
    centred = absmax - offset
    blocks = -(-absmax.size // NESTED_BLOCKSIZE)
    # Zeros do not change a block's absmax, and their codes are dropped.
    padded = np.zeros((blocks, NESTED_BLOCKSIZE), np.float32)
    padded.reshape(-1)[: absmax.size] = centred
    nested_absmax = np.abs(padded).max(axis=1)
    nonzero = nested_absmax > 0
    # The reciprocal of a denormal overflows, and 0 · inf is NaN, as in bitsandbytes.
    with np.errstate(over="ignore", invalid="ignore"):
        inverse = np.reciprocal(np.where(nonzero, nested_absmax, np.float32(1)))
        codes = nearest_codes(padded * inverse[:, None])
    codes[~nonzero] = 0
    return QuantizedAbsmax(codes.reshape(-1)[: absmax.size].copy(), nested_absmax, offset)


def dequantize_absmax(
    codes: npt.NDArray[np.uint8],
    nested_absmax: npt.NDArray[np.float32],
    nested_quant_map: npt.NDArray[np.float32],
    nested_offset: np.float32,
    nested_blocksize: int,
) -> npt.NDArray[np.float32]:
    """``nested_quant_map[code] · nested_absmax + nested_offset``, each step in float32."""
    scales = np.repeat(nested_absmax, nested_blocksize)[: codes.size]
    result: npt.NDArray[np.float32] = nested_quant_map[codes] * scales + nested_offset
    return result


def nearest_codes(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """The codes of values in [-1, 1], by bitsandbytes' table of 65,536 points.

    The table affects results: near a midpoint between two codes it rounds like its nearest point,
    where an exact search would sometimes give the neighbour. NaN gets code 0.
    """
    one, half = np.float32(1), np.float32(0.5)
    clipped = np.clip(np.where(np.isnan(x), -one, x), -one, one)
    points = (clipped + one) * half * np.float32(65535) + half
    return _table()[points.astype(np.uint16)]


@cache
def _table() -> npt.NDArray[np.uint8]:
    quant_map = dynamic_quant_map()
    midpoints = np.float32(0.5) * (quant_map[:-1] + quant_map[1:])
    index = np.arange(65536, dtype=np.float32)
    points = np.float32(-1) + np.float32(2) * index / np.float32(65535)
    return np.searchsorted(midpoints, points, side="left").astype(np.uint8)


_CHUNK = 65536  # bytes of codes processed at a time, so that temporaries stay in the cache

UInt8Array = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A matrix of n = out_features · in_features weights in nb blocks, in bitsandbytes' layout.

    If blocks have minima, scales and minima alternate: ``absmax`` and ``nested_absmax`` are (nb,
    2).
    """

    shape: tuple[int, int]  # (out_features, in_features)
    format: WeightFormat  # the values of codes, and which weights share a scale
    # uint8: two 4-bit codes per byte, the even weight in the high nibble, (ceil(n / 2),), or one
    # 8-bit code, (n,). Rows follow each other without a gap.
    codes: UInt8Array
    # Scale of each block: float32 (nb,), or uint8 codes if double-quantized.
    absmax: Float32Array | UInt8Array
    # float32 (ceil(nb / nested_blocksize),), or None if not double-quantized.
    nested_absmax: Float32Array | None = None
    # float32 (256,), the value of each absmax code, or None if not double-quantized.
    nested_quant_map: Float32Array | None = None
    # A float32 number added to each dequantized scale, or None.
    nested_offset: float | None = None
    # The original type of the weights by PyTorch's name, for example "bfloat16".
    dtype: str = "float32"

    @property
    def nbytes(self) -> int:
        arrays = (self.codes, self.format.quant_map, self.absmax)
        nested = (self.nested_absmax, self.nested_quant_map)
        return sum(a.nbytes for a in arrays) + sum(a.nbytes for a in nested if a is not None)

    def block_scales(self) -> Float32Array:
        """The scale of each block, dequantized: float32 (nb,), or with minima (nb, 2)."""
        if self.nested_absmax is None or self.nested_quant_map is None:
            return self.absmax.astype(np.float32)
        codes, size = self.absmax.astype(np.uint8, copy=False), self.format.nested_blocksize
        assert size is not None
        if self.nested_offset is not None:
            return dequantize_absmax(
                codes,
                self.nested_absmax,
                self.nested_quant_map,
                np.float32(self.nested_offset),
                size,
            )
        nested = np.arange(len(codes)) // size
        scales: Float32Array = self.nested_quant_map[codes] * self.nested_absmax[nested]
        return scales

    def dequantize(self) -> Float32Array:
        """The weights, ``quant_map[code] · scale`` in float32 (not cast to ``dtype``).

        Returns:
            float32 (out_features, in_features).
        """
        weight = self._values()
        scales, blocksize = self.block_scales(), self.format.blocksize
        if self.format.block_rows is not None:
            return self._in_tiles(weight.reshape(self.shape), scales)
        n = weight.size
        whole = n // blocksize * blocksize
        blocks, rest = weight[:whole].reshape(-1, blocksize), weight[whole:]
        self._scale(blocks, scales[: len(blocks), None])
        if rest.size:
            self._scale(rest, scales[-1])
        return weight.reshape(self.shape)

    def _values(self) -> Float32Array:
        """The value of each code: float32 (n,)."""
        n = self.shape[0] * self.shape[1]
        if self.format.bits == 8:
            return self.format.quant_map[self.codes[:n]]
        values = np.empty(2 * self.codes.size, np.float32)
        _decode(self.codes, self.format.quant_map, values)
        return values[:n]

    def _in_tiles(self, weight: Float32Array, scales: Float32Array) -> Float32Array:
        rows, columns = self.shape
        form, down = self.format, self.format.block_rows
        assert down is not None
        across = form.blocks_per_row(columns)
        for number, row in enumerate(range(0, rows, down)):
            tiles = scales[number * across : (number + 1) * across]
            for column, scale in zip(range(0, columns, form.blocksize), tiles, strict=True):
                tile = weight[row : row + down, column : column + form.blocksize]
                self._scale(tile, scale)
        return weight

    def _scale(self, values: Float32Array, scales: Float32Array) -> None:
        """Scales values in place, with scales (…) or scales and minima (…, 2)."""
        minima, form = None, self.format
        if form.has_minima:
            scales, minima = scales[..., 0], scales[..., 1]
        if minima is not None and form.has_zeros:
            values += minima
            minima = None
        values *= scales
        if form.factor != 1.0:
            values *= np.float32(form.factor)
        if minima is not None:
            values += minima


def pack_nibbles(codes: UInt8Array) -> UInt8Array:
    """4-bit codes, two per byte, the even one in the high nibble; an odd last one is padded."""
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
