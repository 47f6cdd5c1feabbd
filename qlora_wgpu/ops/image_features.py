"""Images' features in the hidden states: in place of embeddings, and after the first layers.

Features are inputs, so they get no gradient, nor do the embeddings that they replace.
"""

from __future__ import annotations

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.batch import BatchBuffers


def replace_placeholders(g: Graph, y: Tensor, batch: BatchBuffers, scale: float) -> None:
    """Overwrites the placeholders' rows of y (rows, hidden_size) by scale · features."""
    features = batch.features_of(0, y.columns)
    tensors = {"places": batch.image_rows, "features": features, "y": y}
    g.launch("image_features/replace.wgsl", y.rows * y.units(4), tensors, {"scale": scale})


def text_rows(g: Graph, x: Tensor, batch: BatchBuffers) -> Tensor:
    """x (rows, ·) with zeros in the placeholders' rows; not differentiable."""
    y = g.float32(f"text rows of {x.name}", *x.shape)
    tensors = {"places": batch.image_rows, "x": x, "y": y}
    g.launch("image_features/text_rows.wgsl", y.rows * y.units(4), tensors)
    return y


def add_features(g: Graph, x: Tensor, batch: BatchBuffers, part: int) -> Tensor:
    """x (rows, hidden_size) plus that part of the features in the placeholders' rows, float32."""
    features = batch.features_of(part, x.columns)
    if x.rows != batch.rows or x.columns != features.columns:
        raise GraphError(f"add_features: {x} and {features} do not fit {batch.rows} tokens")
    y = g.float32(f"{x.name} with features", *x.shape)
    tensors = {"places": batch.image_rows, "features": features, "x": x, "y": y}
    g.launch("image_features/add.wgsl", y.rows * y.units(4), tensors)
    g.record(y, [x], lambda dy: g.add_gradient(x, dy))
    return y
