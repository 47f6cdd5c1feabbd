"""LoRA on the embedding: what is looked up, and the gradients of A and of B."""

from __future__ import annotations

import numpy as np

from qlora_wgpu.config import LoraConfig
from qlora_wgpu.lora.trained_tokens import Vocabulary
from qlora_wgpu.ops.lora_ends import embedding
from qlora_wgpu.ops.modules import DenseMatrix
from qlora_wgpu.reference import loss as loss_reference
from qlora_wgpu.reference.tape import grads
from qlora_wgpu.selfcheck.cases.common import each, filled_adapter, joined, normal, whole_gradient
from qlora_wgpu.selfcheck.runner import Runner

_VOCAB, _COLUMNS, _PADDING, _UNSEEN = 1101, 68, 5, 700
_BATCH = (3, 37)
_SCALE, _SCALING = 3.0, 2.0


def _ids() -> np.ndarray:
    """Both ends of the vocabulary and of its shards, each several times; padding; once a token."""
    random = np.random.default_rng(3)
    ids = random.integers(0, _VOCAB, _BATCH)
    ids[ids == _UNSEEN] = _UNSEEN + 1
    ids[:, ::3] = random.permuted(np.resize([0, _VOCAB - 1, _PADDING, 511, 512], (3, 13)), axis=1)
    return ids


@each((5, None, False), (5, _PADDING, True), (80, _PADDING, False))
def check_embedding_pair(run: Runner, r: int, padding: int | None, rounded: bool) -> None:
    """Ranks beside units and workgroups, gradients of either type added to what was there."""
    g, ids = run.graph, _ids()
    config = LoraConfig(r=r, lora_alpha=_SCALING * r, target_modules=["embed"])
    ends = Vocabulary("embed", "head", _VOCAB, _COLUMNS, tied=True)
    adapter, parts = filled_adapter(config, [], vocabulary=ends)
    weight, dy = normal("weight", _VOCAB, _COLUMNS), normal("dy", ids.size, _COLUMNS)
    pieces = tuple((i, run.weight(weight[i : i + 512])) for i in (0, 512, 1024))
    batch, matrix = run.batch(np.ones(_BATCH, np.int64), ids), DenseMatrix(_VOCAB, _COLUMNS, pieces)
    y = embedding(g, matrix, batch, _SCALE, lora=adapter.embedding_lora, padding=padding)
    run.gradients(y, (run.operand if rounded else run.float32)(dy))
    got, flat = run.run(y, whole_gradient(adapter))

    a, b = parts.values()
    dy = run.rounded(dy) if rounded else dy
    exact = run.rounded_weight(weight), ids.ravel(), a, b, _SCALING, _SCALE, padding
    run.compare(got, loss_reference.lookup_with_pair(*exact))
    gradients = grads(loss_reference.lookup_with_pair, dy, *exact, of=(2, 3))
    run.compare(flat, joined(adapter, dict(zip(parts, gradients, strict=True))))
