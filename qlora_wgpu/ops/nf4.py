"""NF4 matrices on the device: kept as 4-bit codes, dequantized to operands just before use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from qlora_wgpu.graph.dtype import ROW_UNIT
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor

EXPERT_WORDS = 64  # so that a binding may begin at any expert
_EXPERT_BYTES = 64 << 20  # of operands that are dequantized at once


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
        experts: If more than one, so many matrices of ``rows`` rows, whose parts follow each other
            in the tensors above, each beginning at a multiple of ``EXPERT_WORDS`` words.
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
    experts: int = 1

    def shards(self, g: Graph) -> Iterator[tuple[int, Tensor]]:
        """Dequantizes piece by piece; each piece's bytes are free once it has been used."""
        row_bytes = g.operand("", 1, self.columns).nbytes
        most = max(g.max_binding // row_bytes // ROW_UNIT * ROW_UNIT, ROW_UNIT)
        for row0 in range(0, self.rows, most):
            yield row0, self._dequantize(g, row0, min(most, self.rows - row0))

    def _dequantize(self, g: Graph, row0: int, rows: int) -> Tensor:
        w = g.operand(self.name, rows, self.columns, image=True)
        self._launch(g, w, self._parts(0), row0)
        return w

    def expert_shards(self, g: Graph) -> Iterator[tuple[int, int, Tensor]]:
        """Dequantizes some experts at a time, one below the other."""
        one = g.operand("", self.rows, self.columns).nbytes
        most = max(min(g.max_binding, _EXPERT_BYTES) // one, 1)
        for first in range(0, self.experts, most):
            count = min(most, self.experts - first)
            w = g.operand(self.name, count * self.rows, self.columns, image=True)
            self._launch(g, w, self._parts(first), 0)
            yield first, count, w

    def _parts(self, first: int) -> dict[str, Tensor]:
        """What is stored of the experts from ``first`` on."""
        parts = {"codes": self.codes, "absmax": self.absmax, "maps": self.maps}
        if self.nested_absmax is not None:
            parts["nested_absmax"] = self.nested_absmax
        if not first:
            return parts
        return {
            name: replace(
                part,
                columns=part.columns - first * self._stride(part),
                stride=part.columns - first * self._stride(part),
                offset=4 * first * self._stride(part),
            )
            for name, part in parts.items()
        }

    def _stride(self, part: Tensor) -> int:
        return part.columns // self.experts

    def _launch(self, g: Graph, w: Tensor, parts: dict[str, Tensor], row0: int) -> None:
        apart = {
            "codes_expert": self._stride(self.codes),
            "absmax_expert": self._stride(self.absmax),
            "nested_expert": self._stride(self.nested_absmax) if self.nested_absmax else 0,
            "maps_expert": self._stride(self.maps),
        }
        if w.image and self.codebook is not None:
            self._dequantize_image(g, w, parts, row0, apart, self.codebook)
        else:
            self._dequantize_buffer(g, w, parts, row0, apart)

    def _dequantize_buffer(
        self, g: Graph, w: Tensor, parts: dict[str, Tensor], row0: int, apart: dict[str, int]
    ) -> None:
        g.launch(
            "nf4/dequantize.wgsl",
            w.rows * w.units(8),
            {**parts, "w": w},
            {
                "rows": w.rows,
                "in_features": self.columns,
                "stride": w.units(8),
                "row0": row0,
                "blocksize": self.blocksize,
                "nested_blocksize": self.nested_blocksize,
                "expert_rows": self.rows,
                **apart,
            },
            {
                "BF16": g.bf16,
                "IMAGE": w.image,
                "DOUBLE_QUANT": self.nested_absmax is not None,
                "ALIGNED": self.columns % 8 == 0,
                "EXPERTS": self.experts > 1,
            },
        )

    def _dequantize_image(
        self,
        g: Graph,
        w: Tensor,
        parts: dict[str, Tensor],
        row0: int,
        apart: dict[str, int],
        codebook: Tensor,
    ) -> None:
        tensors = {**parts, "codebook": codebook, "w": w}
        if self.nested_absmax is None:
            del tensors["maps"]
        count = w.rows * self.columns // 32
        g.launch(
            "nf4/dequantize_image.wgsl",
            count,
            tensors,
            {
                "count": count,
                "first": row0 * self.columns // 32,
                "expert_units": self.rows * self.columns // 32,
                **apart,
            },
            {
                "BF16": g.bf16,
                "DOUBLE_QUANT": self.nested_absmax is not None,
                "BLOCKSIZE": self.blocksize,
                "NESTED_BLOCKSIZE": self.nested_blocksize,
                "EXPERTS": self.experts > 1,
            },
            label="nf4/dequantize",
        )


def pair_values(quant_map: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The two values of each byte of codes, the high nibble's first: (256, 4), the rest zero."""
    pairs = np.zeros((256, 4), np.float32)
    code = np.arange(256)
    pairs[:, 0], pairs[:, 1] = quant_map[code >> 4], quant_map[code & 15]
    return pairs
