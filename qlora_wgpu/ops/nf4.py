"""NF4 matrices on the device: kept as 4-bit codes, dequantized to operands just before use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import ROW_UNIT, Tensor


@dataclass(frozen=True)
class NF4Matrix:
    """A quantized (out_features, in_features) matrix.

    Attributes:
        codes: Two codes a byte, bitsandbytes' order.
        absmax: float32 scales of the blocks, or their 8-bit codes if doubly quantized.
        maps: The 16 values of the codes, then the 256 of the scales' codes and their offset.
        nested_absmax: Scales of the scales, if doubly quantized.
        nested_blocksize: Scales that share one of those.
        codebook: ``pair_values`` of the codes as an image, for software adapters and where
            columns and blocksize are multiples of 32.
    """

    name: str
    rows: int
    columns: int
    blocksize: int
    codes: Tensor
    absmax: Tensor
    maps: Tensor
    nested_absmax: Tensor | None
    nested_blocksize: int
    codebook: Tensor | None = None

    def shards(self, g: Graph) -> Iterator[tuple[int, Tensor]]:
        """Dequantizes piece by piece; each piece's bytes are free once it has been used."""
        row_bytes = g.operand("", 1, self.columns).nbytes
        most = max(g.max_binding // row_bytes // ROW_UNIT * ROW_UNIT, ROW_UNIT)
        for row0 in range(0, self.rows, most):
            yield row0, self._dequantize(g, row0, min(most, self.rows - row0))

    def _dequantize(self, g: Graph, row0: int, rows: int) -> Tensor:
        w = g.operand(self.name, rows, self.columns, image=True)
        if w.image and self.codebook is not None:
            self._dequantize_image(g, w, row0, self.codebook)
            return w
        tensors = {"codes": self.codes, "absmax": self.absmax, "maps": self.maps, "w": w}
        if self.nested_absmax is not None:
            tensors["nested_absmax"] = self.nested_absmax
        g.launch(
            "nf4/dequantize.wgsl",
            rows * w.units(8),
            tensors,
            {
                "rows": rows,
                "in_features": self.columns,
                "stride": w.units(8),
                "row0": row0,
                "blocksize": self.blocksize,
                "nested_blocksize": self.nested_blocksize,
            },
            {
                "BF16": g.bf16,
                "IMAGE": w.image,
                "DOUBLE_QUANT": self.nested_absmax is not None,
                "ALIGNED": self.columns % 8 == 0,
            },
        )
        return w

    def _dequantize_image(self, g: Graph, w: Tensor, row0: int, codebook: Tensor) -> None:
        tensors = {"codes": self.codes, "absmax": self.absmax, "codebook": codebook, "w": w}
        if self.nested_absmax is not None:
            tensors |= {"nested_absmax": self.nested_absmax, "maps": self.maps}
        count = w.rows * self.columns // 32
        g.launch(
            "nf4/dequantize_image.wgsl",
            count,
            tensors,
            {
                "count": count,
                "first": row0 * self.columns // 32,
            },
            {
                "BF16": g.bf16,
                "DOUBLE_QUANT": self.nested_absmax is not None,
                "BLOCKSIZE": self.blocksize,
                "NESTED_BLOCKSIZE": self.nested_blocksize,
            },
            label="nf4/dequantize",
        )


def pair_values(quant_map: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The two values of each byte of codes, the high nibble's first: (256, 4), the rest zero."""
    pairs = np.zeros((256, 4), np.float32)
    code = np.arange(256)
    pairs[:, 0], pairs[:, 1] = quant_map[code >> 4], quant_map[code & 15]
    return pairs
