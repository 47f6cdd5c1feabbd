"""The parts of a layer's input that dropout keeps and leaves: y = mask ⊙ x and (1 - mask) ⊙ x."""

from __future__ import annotations

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.dropout import DropoutMask, dropout_params
from qlora_wgpu.ops.batch import BatchBuffers


def dropout_part(
    g: Graph, x: Tensor, mask: DropoutMask, batch: BatchBuffers, *, rest: bool = False
) -> Tensor:
    """Computes mask ⊙ x, or what is left of x.

    Args:
        g: The graph.
        x: (rows, columns) of any type.
        mask: Zeros, and 1 / (1 - probability); ones where the batch has no dropout.
        batch: The micro-batch, which has the random key.
        rest: Whether (1 - mask) ⊙ x is meant.

    Returns:
        (rows, columns) operand.
    """
    units = x.rows * x.units(8)
    params = {"units": units, "rest": int(rest), **dropout_params(mask)}

    def launch(given: Tensor, made: Tensor) -> Tensor:
        tensors = {"x": given, "batch_info": batch.info, "y": made}
        g.launch("dropout/part.wgsl", units, tensors, params)
        return made

    def make() -> Tensor:
        return launch(x, g.operand(f"dropout({x.name})", x.rows, x.columns))

    def vjp(dy: Tensor) -> None:
        g.add_gradient(x, launch(dy, g.gradient_for(x)))

    y = make()
    g.record(y, [x], vjp, remake=make)
    return y
