"""Linear layers of new tokens: each weight is read once, where it is, decoded on the way.

The mathematics is that of ``ops/linear.py`` without a backward and without dropout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.few_rows import FEW_ROWS, FewRows
from qlora_wgpu.kernels.gemm import LoraTerm
from qlora_wgpu.kernels.lora import Lora
from qlora_wgpu.kernels.quantized_rows import QuantizedRows
from qlora_wgpu.kernels.strips import Strips
from qlora_wgpu.ops.modules import DenseMatrix, Matrix
from qlora_wgpu.ops.quantized import QuantizedMatrix, rows_of
from qlora_wgpu.ops.strips import StripStore


def readable(g: Graph, weights: Sequence[Matrix]) -> QuantizedRows | None:
    """Quantized matrices of one input as these products read them, if they can be one product."""
    quantized = [w for w in weights if isinstance(w, QuantizedMatrix) and w.experts == 1]
    return rows_of(g, quantized) if len(quantized) == len(weights) else None


def pieces(
    g: Graph, weight: Matrix, strips: StripStore | None
) -> Iterator[tuple[int, Tensor | QuantizedRows | Strips]]:
    """Yields ``(first row, some rows)`` of a matrix as these products read it."""
    if isinstance(weight, QuantizedMatrix):
        whole = copied(g, [weight], strips) or readable(g, [weight])
        if whole is not None:
            yield 0, whole
            return
    still = isinstance(weight, DenseMatrix) and weight.trained is None and weight.whole is None
    for row0, w in weight.shards(g):
        made = strips.of_dense(g, w) if strips is not None and still else None
        yield row0, made or w


def copied(g: Graph, weights: Sequence[Matrix], strips: StripStore | None) -> Strips | None:
    """Quantized matrices of one input in strips, if there are such."""
    quantized = [w for w in weights if isinstance(w, QuantizedMatrix) and w.experts == 1]
    if strips is None or len(quantized) < len(weights):
        return None
    return strips.of_quantized(g, quantized)


def lora_term(g: Graph, x: Tensor, lora: Lora | None) -> LoraTerm | None:
    """u = scaling · x·Aᵀ and B, of a layer or of several whose adapters lie together.

    The RMSNorm that made x is a part of its launch, if it was the last one.
    """
    if lora is None:
        return None
    u = g.float32("lora u", x.rows, lora.r)
    FEW_ROWS.launch(g, FewRows(x, lora.a, (u,), scale=lora.scaling, label="lora/down"))
    return lora.forward_term(u)


def product(
    g: Graph,
    x: Tensor,
    weight: Matrix,
    y: Tensor,
    *,
    scale: float = 1.0,
    term: LoraTerm | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    strips: StripStore | None = None,
    label: str = "few_rows/forward",
) -> None:
    """y = scale · x·wᵀ + term + bias + residual; all of y is overwritten.

    Args:
        g: The graph.
        x: (rows, in_features) of any type.
        weight: The matrix.
        y: (rows, out_features).
        scale: The factor of the product alone.
        term: LoRA's.
        bias: float32 (out_features).
        residual: (rows, out_features).
        strips: Where there are copies of the weights for it.
        label: For timing tables.
    """
    for row0, w in pieces(g, weight, strips):
        problem = FewRows(
            x, w, (y,), row0=row0, scale=scale, lora=term, bias=bias, residual=residual,
            label=label,
        )  # fmt: skip
        FEW_ROWS.launch(g, problem)
