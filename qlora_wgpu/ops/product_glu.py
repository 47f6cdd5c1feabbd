"""A gated linear unit of new tokens as a part of the product that makes gate and up."""

from __future__ import annotations

from collections.abc import Mapping

from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.dtype import ceil_div
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor

_PRODUCT = "few_rows/strips.wgsl"
_GLU = "few_rows/strips_glu.wgsl"


def product_and_glu(
    g: Graph, gate: Tensor, up: Tensor, activation: Mapping[str, Constant]
) -> Tensor | None:
    """activation(gate) · up, of what the last launch made and nobody else reads.

    Args:
        g: The graph, without a backward.
        gate: (rows, columns).
        up: Like gate.
        activation: The constants of the activation.

    Returns:
        (rows, columns) operand; None where no product for new tokens without biases made the two,
        which changes nothing.
    """
    product = g.last_made(_PRODUCT, gate)
    if product is None or "bias" in product.tensors or "y2" in product.tensors:
        return None
    tensors = dict(product.tensors)
    if tensors.pop("y") is not gate or tensors.pop("y1", None) is not up:
        return None
    y = g.operand("glu", gate.rows, gate.columns)
    if gate.dtype != y.dtype or up.dtype != y.dtype:
        return None
    g.take_back(_PRODUCT, gate)
    threads = int(product.constants["THREADS"])
    _, rows, _ = product.workgroups
    g.launch(
        _GLU,
        (ceil_div(gate.columns, 4 * threads), rows, 1),
        {**tensors, "y": y},
        product.values,
        {**product.constants, **activation},
        flops=product.flops,
        label=product.label,
    )
    return y
