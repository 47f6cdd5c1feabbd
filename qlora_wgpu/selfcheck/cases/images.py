"""Images' features in place of embeddings, and added to hidden states."""

from __future__ import annotations

from typing import Any

import numpy as np

from qlora_wgpu.config import LoraConfig
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor, pad_rows
from qlora_wgpu.lora.trained_tokens import Vocabulary
from qlora_wgpu.model.batch_encoding import encode_batch
from qlora_wgpu.model.image_inputs import ImageInputs
from qlora_wgpu.ops.batch import BatchBuffers, ImageLayout, make_batch_buffers
from qlora_wgpu.ops.image_features import add_features
from qlora_wgpu.ops.lora_ends import embedding
from qlora_wgpu.reference import loss as loss_reference
from qlora_wgpu.selfcheck.cases.common import (
    ONES,
    ROWS,
    Exact,
    compare_op,
    each,
    filled_adapter,
    normal,
)
from qlora_wgpu.selfcheck.cases.linear import dense
from qlora_wgpu.selfcheck.runner import Array, Runner

_VOCAB, _COLUMNS, _IMAGE = 83, 52, 7
# The row of features of each token, plus one: two images, of which the second ends the sequence.
_PLACES = np.zeros(ROWS, np.int64)
_PLACES[[*range(3, 12), *range(30, ROWS)]] = np.arange(1, 17)


def _batch(ids: np.ndarray, features: Array, part: int) -> BatchBuffers:
    """A batch whose placeholders have these features as that part of theirs."""
    layout = ImageLayout(_IMAGE, deepstack=1)
    batch = make_batch_buffers(*ids.shape, images=layout, image_rows=len(features) + 1)
    images = ImageInputs(features.astype(np.float32), _PLACES[None])
    batch.storage.data = encode_batch(batch, ids, ONES, images=images)
    table = batch.features_of(part, features.shape[1])
    assert table.storage is not None
    table.storage.data = pad_rows(np.pad(images.features, ((0, 1), (0, 0))))
    return batch


@each((1.0,), (3.0,))
def check_image_features(run: Runner, scale: float) -> None:
    """Rows of an embedding with an adapter, which placeholders give no gradient."""
    features, adapted = normal("features", int(_PLACES.max()), _COLUMNS), 2.0
    ids = np.random.default_rng(2).integers(0, _VOCAB, (1, ROWS))
    ids[0, _PLACES > 0] = _IMAGE
    config = LoraConfig(r=5, lora_alpha=5 * adapted, target_modules=["embed"])
    ends = Vocabulary("embed", "head", _VOCAB, _COLUMNS, tied=True)
    adapter = filled_adapter(config, [], vocabulary=ends)
    matrix, weight = dense(run, normal("weight", _VOCAB, _COLUMNS), 48)
    batch, lora = _batch(ids, features, 0), adapter[0].embedding_lora

    def op(g: Graph) -> Tensor:
        return embedding(g, matrix, batch, lora=lora, feature_scale=scale)

    def formula(parts: dict[str, Array]) -> Any:
        a, b = parts.values()
        y = loss_reference.lookup_with_pair(weight, ids.ravel(), a, b, adapted)
        return loss_reference.with_features(y, features, _PLACES, scale)

    compare_op(run, op, formula, [], exact=True, adapter=adapter)


@each((True,), (False,))
def check_added_features(run: Runner, exact_gradient: bool) -> None:
    """Features are added to a residual stream, whose gradient passes unchanged."""
    features = normal("features", int(_PLACES.max()), _COLUMNS)
    batch = _batch(np.full((1, ROWS), _IMAGE), features, 1)

    def op(g: Graph, x: Tensor) -> Tensor:
        return add_features(g, x, batch, 1)

    def formula(x: Array) -> Any:
        return loss_reference.add_features(x, features, _PLACES)

    compare_op(run, op, formula, [Exact(normal("x", ROWS, _COLUMNS))], exact=exact_gradient)
