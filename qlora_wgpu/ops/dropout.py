"""A layer's input in two: what dropout keeps, mask ⊙ x, and the rest, (1 - mask) ⊙ x."""

from __future__ import annotations

from functools import partial

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor, matrix
from qlora_wgpu.kernels.dropout import DropoutMask, dropout_params
from qlora_wgpu.ops.batch import BatchBuffers


def masked(g: Graph, x: Tensor, mask: DropoutMask, batch: BatchBuffers, dtype: str) -> Tensor:
    """mask ⊙ x in an element type; not differentiable."""
    y = matrix(f"masked {x.name}", x.rows, x.columns, dtype)
    units = x.rows * x.units(8)
    tensors = {"x": x, "batch_info": batch.info, "y": y}
    params = {"units": units, **dropout_params(mask)}
    g.launch("dropout/part.wgsl", units, tensors, params, {"REST": False})
    return y


def dropout_parts(
    g: Graph, x: Tensor, mask: DropoutMask, batch: BatchBuffers
) -> tuple[Tensor, Tensor]:
    """Divides x.

    Args:
        g: The graph.
        x: (rows, columns) of any type.
        mask: Zeros, and 1 / (1 - probability); ones where the batch has no dropout.
        batch: The micro-batch, which has the random key.

    Returns:
        What is kept and the rest, (rows, columns) operands.
    """
    units = x.rows * x.units(8)
    params = {"units": units, **dropout_params(mask)}

    def part(*, rest: bool) -> Tensor:
        y = g.operand(f"dropout({x.name})", x.rows, x.columns)
        tensors = {"x": x, "batch_info": batch.info, "y": y}
        g.launch("dropout/part.wgsl", units, tensors, params, {"REST": rest})
        return y

    def vjp(gradients: list[Tensor | None]) -> None:
        dkept, drest = gradients
        assert dkept is not None and drest is not None
        dx = g.gradient_for(x)
        tensors = {"dkept": dkept, "batch_info": batch.info, "drest": drest, "dx": dx}
        g.launch("dropout/backward.wgsl", units, tensors, params)
        g.add_gradient(x, dx)

    kept, rest = part(rest=False), part(rest=True)
    g.record_jointly([kept, rest], [x], vjp)
    g.can_remake(kept, partial(part, rest=False))
    return kept, rest
