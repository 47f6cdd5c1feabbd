"""NF4 matrices on the device: kept as 4-bit codes, dequantized to operands just before use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qlora_wgpu.gpu.device import fold_workgroups
from qlora_wgpu.graph.graph import Graph, ceil_div
from qlora_wgpu.graph.tensor import ROW_UNIT, Tensor


@dataclass(frozen=True)
class NF4Matrix:
    """A quantized (out_features, in_features) matrix.

    Attributes:
        codes: Two codes a byte, bitsandbytes' order.
        absmax: float32 scales of the blocks, or their 8-bit codes if doubly quantized.
        maps: The 16 values of the codes, then the 256 of the scales' codes and their offset.
        nested_absmax: Scales of the scales, if doubly quantized.
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

    def shards(self, g: Graph) -> Iterator[tuple[int, Tensor]]:
        """Dequantizes piece by piece; each piece's bytes are free once it has been used."""
        row_bytes = g.operand("", 1, self.columns).nbytes
        most = max(g.max_binding // row_bytes // ROW_UNIT * ROW_UNIT, ROW_UNIT)
        for row0 in range(0, self.rows, most):
            yield row0, self._dequantize(g, row0, min(most, self.rows - row0))

    def _dequantize(self, g: Graph, row0: int, rows: int) -> Tensor:
        w = g.operand(self.name, rows, self.columns, image=True)
        tensors = {"codes": self.codes, "absmax": self.absmax, "maps": self.maps, "w": w}
        if self.nested_absmax is not None:
            tensors["nested_absmax"] = self.nested_absmax
        g.launch(
            "nf4/dequantize.wgsl",
            fold_workgroups(ceil_div(rows * w.units(8), 64)),
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
