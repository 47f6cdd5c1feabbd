"""Gathering a batch's label rows, and putting them back."""

from __future__ import annotations

from qlora_wgpu.graph.dtype import ITEM_SIZE
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import TEXEL, Tensor, matrix
from qlora_wgpu.ops.batch import BatchBuffers


def gather(g: Graph, x: Tensor, count: int, first: int, batch: BatchBuffers) -> Tensor:
    """The label rows ``first`` to ``first + count`` of x, in front; zeros where there are none."""
    y = matrix(f"{x.name} rows", count, x.columns, x.dtype)
    words = row_words(x)
    g.launch(
        "rows/gather.wgsl",
        count * words,
        {"x": x, "rows": batch.label_rows, "batch_info": batch.info, "y": y},
        {"count": count, "first": first, "stride": words},
    )
    return y


def scatter(g: Graph, x: Tensor, y: Tensor, first: int, batch: BatchBuffers) -> None:
    """Puts rows where ``gather`` took them from, and leaves the others of y alone."""
    g.launch(
        "rows/scatter.wgsl",
        x.rows * x.units(4),
        {"x": x, "rows": batch.label_rows, "batch_info": batch.info, "y": y},
        {"count": x.rows, "first": first, "stride": x.units(4)},
    )


def row_words(x: Tensor) -> int:
    """The stride of a matrix in words of 16 bytes."""
    return x.stride * ITEM_SIZE[x.dtype] // TEXEL
