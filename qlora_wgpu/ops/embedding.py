"""Token embedding: rows of a frozen matrix, looked up into the residual stream."""

from __future__ import annotations

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.batch import Batch
from qlora_wgpu.ops.modules import Matrix


def embedding(g: Graph, weight: Matrix, batch: Batch, scale: float = 1.0) -> Tensor:
    """Looks up a batch's tokens.

    Args:
        g: The graph.
        weight: (vocab_size, hidden_size).
        batch: Whose ``input_ids`` are looked up; each must be below vocab_size.
        scale: What the rows are multiplied by.

    Returns:
        (rows, hidden_size) float32.
    """
    y = g.float32("embedding", batch.rows, weight.columns)
    for row0, shard in weight.shards(g):
        g.launch(
            "embedding/forward.wgsl",
            y.rows * y.units(4),
            {"ids": batch.input_ids, "weight": shard, "y": y},
            {
                "rows": y.rows,
                "stride": y.units(4),
                "row0": row0,
                "shard_rows": shard.rows,
                "texel0": shard.texel0,
                "scale": scale,
            },
            {"BF16": shard.dtype == "bfloat16", "IMAGE": shard.image},
        )
    return y
