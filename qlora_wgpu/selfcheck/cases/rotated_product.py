"""Products with strips that rotate queries and keys of new tokens, and keep keys and values."""

from __future__ import annotations

import numpy as np

from qlora_wgpu.config import LoraConfig
from qlora_wgpu.families.family import LinearSpec
from qlora_wgpu.graph.tensor import Storage, Tensor, vector
from qlora_wgpu.model.batch_encoding import encode_batch
from qlora_wgpu.ops.attention import append
from qlora_wgpu.ops.batch import make_batch_buffers
from qlora_wgpu.ops.kv_cache import CacheView, KVCache
from qlora_wgpu.ops.linear import linear_group
from qlora_wgpu.ops.modules import Linear
from qlora_wgpu.ops.quantized import StripStore
from qlora_wgpu.ops.rope import rope
from qlora_wgpu.reference import attention as attention_reference
from qlora_wgpu.reference import linear as linear_reference
from qlora_wgpu.selfcheck.cases.common import each, filled_adapter, normal
from qlora_wgpu.selfcheck.cases.few_rows import in_one_range, stored_weight
from qlora_wgpu.selfcheck.cases.groups import in_one_storage
from qlora_wgpu.selfcheck.cases.strips import multiplied
from qlora_wgpu.selfcheck.runner import ROUNDING, Runner

_CAPACITY = 5  # tokens of a text


@each(
    (16, (4, 2), 3, 8, True, False, False),
    (16, (3, 3), 11, 0, True, True, True),
    (32, (6, 2), 1, 16, False, False, False),
)
def check_rotated_product(
    run: Runner,
    head_dim: int,
    heads: tuple[int, int],
    texts: int,
    r: int,
    dense: bool,
    has_bias: bool,
    by_rows: bool,
) -> None:
    """Texts at unlike places, one of them past its capacity, of which nothing is kept.

    Args:
        run: Where it runs.
        head_dim: Elements of a head.
        heads: Of queries, and of keys and values.
        texts: How many; more than an invocation has sums for, too.
        r: The adapter's rank; 0 for none.
        dense: Whether strips are of numbers instead of codes.
        has_bias: Whether there are biases.
        by_rows: Whether the rows of the table are told.
    """
    g, inner = run.graph, 64
    batch = make_batch_buffers(texts, 1, CacheView(cache := KVCache(_CAPACITY, texts)))
    ids = np.zeros((texts, 1), np.int64)
    past = (3 + 2 * np.arange(texts)[:, None]) % (_CAPACITY + 1)
    places = np.arange(texts)[::-1, None]
    batch.storage.data = encode_batch(batch, ids, ids + 1, past=past, places=places)
    names = [f"model.layers.0.{letter}_proj" for letter in "qkv"]
    outer = [head_dim * heads[n > 0] for n in range(3)]
    specs = [LinearSpec(n, columns, inner) for n, columns in zip(names, outer, strict=True)]
    adapter, parts = filled_adapter(LoraConfig(r=max(r, 1), lora_alpha=max(r, 1)), specs)
    stored = [stored_weight("double", columns, inner, n) for n, columns in enumerate(outer)]
    matrices = in_one_range(stored, Storage("group", "check", 256))
    store = StripStore(dense=dense)
    store.of_quantized(g, matrices)
    store.fill(g)
    assert batch.cache is not None
    batch.cache.strips = store
    biases = [normal(f"bias of {name}", n) * has_bias for name, n in zip(names, outer, strict=True)]
    tensors: list[Tensor] | list[None] = in_one_storage(biases) if has_bias else [None] * 3
    layers = [
        Linear(name, matrix, bias, adapter.loras[name] if r else None)
        for name, matrix, bias in zip(names, matrices, tensors, strict=True)
    ]
    table = normal("table", _CAPACITY + 1, head_dim // 2, 2)
    rows = np.arange(texts) % 3 if by_rows else past.ravel()
    numbers = Storage("rows", "check", 4 * texts, rows.astype(np.uint32))
    told = vector("rows", texts, "uint32", numbers) if by_rows else None
    x = 0.1 * normal("x", texts, inner)
    q, k, v = linear_group(g, run.operand(x), layers, batch)
    constant = g.constant("table", table.astype(np.float32))
    q, k = rope(g, [q, k], constant, batch, head_dim, head_dim, rows=told)
    layer = batch.cache.next_layer(run.dtype, v.columns, g.max_binding * g.profile.textures)
    append(g, (k, v), layer, batch)
    got_q, *kept = run.run(q, *cache.layers[0])
    x, made = run.rounded(x), []
    for name, weight, bias in zip(names, stored, biases, strict=True):
        a, b = (parts[n] * (r > 0) for n in parts if name in n)
        w = multiplied(run, weight, dense=dense)
        made.append(linear_reference.linear(x, w, a, b, 1.0, np.ones_like(x), bias))
    # What is rounded may be the neighbour of what exact sums are rounded to: of both of a pair.
    off = [2.0 * ROUNDING[run.dtype] * np.abs(each) for each in made]
    turned = [run.rounded(y) for y in made]
    for n in range(2):
        turned[n] = attention_reference.rope(turned[n], rows, table, head_dim, head_dim)
        both = [
            attention_reference.rope(off[n], rows, np.abs(table) * signs, head_dim, head_dim)
            for signs in ([1.0, 1.0], [1.0, -1.0])
        ]
        off[n] = np.maximum(*both)
    run.compare(got_q, turned[0], run.dtype, inner=off[0])
    is_kept = (past < _CAPACITY).ravel()
    at = (places * _CAPACITY + past).ravel()[is_kept]
    for got, exact, near in zip(kept, turned[1:], off[1:], strict=True):
        run.compare(got[at], exact[is_kept], run.dtype, inner=near[is_kept])
        others = np.delete(got, at, axis=0)
        run.compare_exactly(others, np.zeros_like(others))
