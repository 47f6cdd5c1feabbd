"""Rotary position embedding (Su et al., 2021), half-split as in Llama or interleaved."""

from __future__ import annotations

from qlora_wgpu.graph.dtype import ITEM_SIZE
from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import TEXEL, Tensor
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.image import as_buffer, as_image


def rope(
    g: Graph,
    x: Tensor,
    table: Tensor,
    batch: BatchBuffers,
    head_dim: int,
    rotary_dim: int,
    *,
    interleaved: bool = False,
) -> Tensor:
    """Rotates every head of x by its token's position.

    Args:
        g: The graph.
        x: (rows, heads · head_dim) operand.
        table: float32 (positions, rotary_dim / 2) of (cos, sin).
        batch: Whose ``positions`` are used.
        head_dim: Elements of a head; even.
        rotary_dim: How many of them are rotated.
        interleaved: Whether pairs are neighbours, instead of half of rotary_dim apart.

    Returns:
        (rows, heads · head_dim) operand.
    """
    if x.columns % head_dim or rotary_dim > head_dim or rotary_dim % 2:
        raise GraphError(
            f"rope: {x} has no heads of {head_dim} elements, {rotary_dim} of them rotated in pairs"
        )
    y = g.operand(f"rope({x.name})", x.rows, x.columns)
    # Heads and their rotated halves must be whole texels.
    whole = head_dim % 8 == 0 and rotary_dim % 16 == 0 and not interleaved
    y.image = g.profile.images and whole

    def rotate(source: Tensor, target: Tensor, sign: float) -> None:
        if target.image:
            rotate_image(source, target, sign)
            return
        g.launch(
            "rope/rotate.wgsl",
            x.rows * x.units(2),
            {
                "positions": batch.positions,
                "table": table,
                "x": as_buffer(g, source),
                "y": target,
            },
            {
                "rows": x.rows,
                "columns": x.columns,
                "stride": x.stride,
                "head_dim": head_dim,
                "rotary_dim": rotary_dim,
                "sign": sign,
            },
            {"BF16": g.bf16, "INTERLEAVED": interleaved},
        )

    def rotate_image(source: Tensor, target: Tensor, sign: float) -> None:
        elements = TEXEL // ITEM_SIZE[x.dtype]
        heads = x.columns // head_dim
        head, half = head_dim // elements, rotary_dim // 2 // elements
        g.launch(
            "rope/rotate_image.wgsl",
            x.rows * heads * (head - half),
            {
                "positions": batch.positions,
                "table": as_image(g, table)[0],
                "x": source,
                "y": target,
            },
            {"rows": x.rows, "stride": x.units(elements), "sign": sign},
            {
                "BF16": g.bf16,
                "X_IMAGE": source.image,
                "HEADS": heads,
                "HEAD": head,
                "HALF": half,
            },
            label="rope/rotate",
        )

    rotate(x, y, 1.0)

    def vjp(dy: Tensor) -> None:
        dx = g.operand(f"d {x.name}", x.rows, x.columns)
        dx.image = y.image
        rotate(dy, dx, -1.0)
        g.hand_over(x, dx)

    g.record(y, [x], vjp)
    return y
