"""Gathering a batch's label rows, putting them back, and turning chunks of them."""

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


def transposed(
    g: Graph,
    x: Tensor,
    first: int,
    batch: BatchBuffers,
    factors: Tensor | None = None,
    columns: tuple[int, int] | None = None,
) -> Tensor:
    """A chunk of the label rows as columns: zeros where there are none, whatever is in x.

    Args:
        g: The graph.
        x: (count, columns) of any type, the label rows from ``first`` on.
        first: The first of them.
        batch: The micro-batch.
        factors: What each label row is multiplied by, if by anything, float32.
        columns: The first column that is taken, and how many are; all by default.

    Returns:
        (columns, count), of x's type.
    """
    column0, count = columns or (0, x.columns)
    y = matrix(f"{x.name} transposed", count, x.rows, x.dtype)
    g.launch(
        "rows/transposed.wgsl",
        y.rows * y.units(8),
        {"x": x, "batch_info": batch.info, "factors": factors, "y": y},
        {
            "count": x.rows,
            "first": first,
            "columns": y.rows,
            "x_stride": x.stride,
            "y_stride": y.units(8),
            "column0": column0,
        },
    )
    return y


def row_words(x: Tensor) -> int:
    """The stride of a matrix in words of 16 bytes."""
    return x.stride * ITEM_SIZE[x.dtype] // TEXEL
