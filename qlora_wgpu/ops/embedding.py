"""Token embedding: rows of a frozen matrix, looked up into the residual stream.

Those rows that are trained get their gradient, and so does a pair (LoRA) beside them.
"""

from __future__ import annotations

import math
import zlib

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.dropout import dropout_params
from qlora_wgpu.kernels.lora import Lora
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.embedding_pair import EmbeddingPair
from qlora_wgpu.ops.modules import HostMatrix, Matrix, trained_rows, trained_whole
from qlora_wgpu.ops.trained_gradient import add_lookup_gradient
from qlora_wgpu.ops.trained_rows import overwrite_looked_up
from qlora_wgpu.ops.whole_gradient import add_whole_lookup

_NOISE_KEY = zlib.crc32(b"neftune")


def embedding(
    g: Graph,
    weight: Matrix | HostMatrix,
    batch: BatchBuffers,
    scale: float = 1.0,
    noise_scale: float = 1.0,
    lora: Lora | None = None,
    padding: int | None = None,
) -> Tensor:
    """Looks up a batch's tokens.

    Args:
        g: The graph.
        weight: (vocab_size, hidden_size), of any type, on the device or the host.
        batch: Whose ``input_ids`` are looked up; each must be below vocab_size. Its ``noise`` α
            adds noise in ±α / √(seq · hidden_size) to training batches (NEFTune, Jain et al.,
            2023).
        scale: What the rows are multiplied by.
        noise_scale: What the noise is multiplied by.
        lora: Its adapter, if it has one: a (r, vocab_size), b (hidden_size, r).
        padding: A token that the adapter's A gets no gradient of.

    Returns:
        (rows, hidden_size) float32.
    """
    y = g.float32("embedding", batch.rows, weight.columns)
    info = batch.info if batch.noise > 0 else None
    ids, trained, whole = batch.input_ids, trained_rows(weight), trained_whole(weight)
    if isinstance(weight, HostMatrix):
        shards, ids = [(0, batch.rows_of(weight).table)], batch.rows_of(weight).rows
        if trained is not None:
            overwrite_looked_up(g, trained, batch.input_ids, batch.rows_of(weight).table)
    else:
        shards = list(weight.shards(g))
    for row0, shard in shards:
        g.launch(
            "embedding/forward.wgsl",
            y.rows * y.units(4),
            {"ids": ids, "weight": shard, "y": y, "batch_info": info},
            {
                "rows": y.rows,
                "stride": y.units(4),
                "row0": row0,
                "shard_rows": shard.rows,
                "scale": scale,
                "columns": y.columns,
                "noise": noise_scale * batch.noise / math.sqrt(batch.seq * y.columns),
                **dropout_params(None),
                "module_key": _NOISE_KEY,
            },
        )
    if lora is not None:
        pair = EmbeddingPair(g, lora, batch.input_ids, batch.rows, scale, padding)
        pair.add_to(y)
        g.record(y, [], pair.add_gradients, trains=True)
    if trained is not None:
        g.record(
            y,
            [trained.rows],
            lambda dy: add_lookup_gradient(g, trained, batch.input_ids, dy, scale),
        )
    if whole is not None:
        g.record(
            y, [], lambda dy: add_whole_lookup(g, whole, batch.input_ids, dy, scale), trains=True
        )
    return y
