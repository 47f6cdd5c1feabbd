"""Products of few rows, as in decoding: with weights, with packed weights, and fused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.graph.tensor import Storage, Tensor, vector
from qlora_wgpu.model.batch_encoding import encode_batch
from qlora_wgpu.ops.attention import append
from qlora_wgpu.ops.batch import BatchBuffers, make_batch_buffers
from qlora_wgpu.ops.kv_cache import CacheView, KVCache, copy_sequence, encode_copies
from qlora_wgpu.ops.linear import linear, linear_group, most_layers
from qlora_wgpu.ops.logits import logits_of_rows
from qlora_wgpu.ops.modules import DenseMatrix, Head
from qlora_wgpu.ops.norms import rms_norm
from qlora_wgpu.ops.pointwise import glu
from qlora_wgpu.ops.quantized import PackedWeightCache, QuantizedMatrix
from qlora_wgpu.ops.rope import rope
from qlora_wgpu.quant import QuantizedWeight
from qlora_wgpu.reference import attention as attention_reference
from qlora_wgpu.reference import norms as norms_reference
from qlora_wgpu.reference import pointwise as pointwise_reference
from qlora_wgpu.reference.tape import grads
from qlora_wgpu.selfcheck.cases.common import each, normal, uneven
from qlora_wgpu.selfcheck.cases.formats import in_one_range, stored_weight
from qlora_wgpu.selfcheck.cases.linear import Layers, compare_layers, dense
from qlora_wgpu.selfcheck.runner import ROUNDING, Array, Runner, rounded

_COPIED = 7  # tokens that each sequence of a copied cache has room for
_QKV = {"q_proj": 136, "k_proj": 24, "v_proj": 40}


def cached_batch(cache: KVCache, mask: npt.NDArray[np.int64], **where: Any) -> BatchBuffers:
    """A batch with a cache: a prefill, or new tokens after earlier ones."""
    texts, tokens = mask.shape
    batch = make_batch_buffers(texts, tokens, CacheView(cache))
    batch.storage.data = encode_batch(batch, np.zeros_like(mask), mask, **where)
    return batch


def new_tokens(count: int, past: int = 0) -> BatchBuffers:
    """A decoding batch of ``count`` sequences, each of at most four tokens in total."""
    places = np.arange(count)[:, None]
    return cached_batch(KVCache(4, count), np.ones_like(places), past=past, places=places)


def multiplied(run: Runner, stored: QuantizedWeight, *, dense: bool) -> Array:
    """A quantized matrix as used in products with packed weights."""
    w = stored.dequantize().astype(np.float64)
    return run.rounded_weight(w) if dense and run.graph.profile.textures else w


def packed(run: Runner, matrices: list[QuantizedMatrix], *, dense: bool) -> PackedWeightCache:
    """Matrices of one input, packed as codes or dequantized."""
    store = PackedWeightCache(dense=dense)
    store.of_quantized(run.graph, matrices)
    store.fill(run.graph)
    return store


def reading(count: int, store: PackedWeightCache) -> BatchBuffers:
    """A decoding batch of ``count`` sequences with packed weights."""
    return _reads(new_tokens(count), store)


def _reads(batch: BatchBuffers, store: PackedWeightCache) -> BatchBuffers:
    assert batch.cache is not None
    batch.cache.packed_weights = store
    return batch


def _stored_layers(
    run: Runner,
    form: str,
    outer: Mapping[str, int],
    inner: int,
    r: int,
    *,
    has_bias: bool = False,
    dense: bool | None = None,
    scaling: int = 2,
) -> tuple[Layers, PackedWeightCache]:
    """Layers whose matrices are in one range of a storage, packed unless ``dense`` is None."""
    stored = [stored_weight(form, rows, inner, n) for n, rows in enumerate(outer.values())]
    matrices = in_one_range(stored, Storage("group", "check", 256))
    store = PackedWeightCache()
    if dense is not None:
        store = packed(run, matrices, dense=dense)
    weights = {
        name: (own, multiplied(run, weight, dense=bool(dense)))
        for name, own, weight in zip(outer, matrices, stored, strict=True)
    }
    return Layers.of(run, weights, r, has_bias=has_bias, together=True, scaling=scaling), store


@each(
    ("double", 64, 3, 8, "residual", True),
    ("double", 64, 1, 8, "residual", False),
    ("NF4", 72, 9, 5, "operand", False),
    ("Q5_K", 256, 1, 0, "residual", True),
    ("AWQ", 96, 2, 8, "operand", False),
    ("LLM.int8", 72, 1, 0, "operand", False),
    ("FP8", 96, 2, 0, "residual", True),
    ("dense", 104, 1, 8, "residual", True),
    ("dense", 90, 9, 3, "operand", False),
)
def check_few_rows(
    run: Runner, form: str, inner: int, rows: int, r: int, output: str, has_bias: bool
) -> None:
    """A layer with few rows, with an adapter unless r is 0."""
    outer = {"q_proj": 141}
    if form == "dense":
        w = dense(run, normal("w", 141, inner), 64)
        layers = Layers.of(run, {"q_proj": w}, r, has_bias=has_bias)
    else:
        layers, _ = _stored_layers(run, form, outer, inner, r, has_bias=has_bias)
    if inner % 8:  # dequantized first
        layers = replace(layers, weights=[run.rounded_weight(w) for w in layers.weights])
    compare_layers(run, layers, [new_tokens(rows)], output, exact=None)


@each(
    ("double", 64, 3, 8, False, (False, True, False)),
    ("NF4", 64, 3, 0, True, (False, True)),
    ("double", 64, 1, 8, False, 3 * (False,)),
    ("double", 64, 1, 8, False, 2 * (False,)),
)
def check_few_rows_of_a_group(
    run: Runner, form: str, inner: int, rows: int, r: int, has_bias: bool, exact: tuple[bool, ...]
) -> None:
    """Layers of one input as one product, with matrices in one range of a storage."""
    count = len(exact)
    outer = dict(list(_QKV.items())[:count])
    layers, _ = _stored_layers(run, form, outer, inner, r, has_bias=has_bias)
    compare_layers(run, layers, [new_tokens(rows)] * count, exact=None, group=list(exact))


@each(
    (72, 3, 5, False),
    (1200, 1, 16, False),
    (40, 2, 8, True),
    (200, 21, 37, False),
    (24, 9, 3, True),
)
def check_norm_and_down(run: Runner, inner: int, rows: int, r: int, of_operand: bool) -> None:
    """The norm of a layer's input and the adapter's u: rows of different magnitudes."""
    h, weight = uneven("h", rows, inner), rounded(1 + 0.1 * normal("norm", inner), "float32")
    given, h = (run.operand(h), run.rounded(h)) if of_operand else (run.float32(h), h)
    layers = Layers.of(run, {"q_proj": dense(run, normal("w", 24, inner))}, r)
    x = rms_norm(run.graph, given, run.float32(weight), 1e-5)
    y = linear(run.graph, x, layers.linears[0], new_tokens(rows), float32=True)
    got_x, got_y = run.run(x, y)
    normed = norms_reference.rms_norm(rounded(h, "float32"), weight, 1e-5)
    run.compare(got_x, normed, x.dtype, by_row=True)
    assert layers.adapter is not None
    run.compare(got_y, layers.formula(got_x, layers.adapter[1])[0])


@each((5, 24, True), (3, 40, False))
def check_copied_sequence(run: Runner, tokens: int, columns: int, has_state: bool) -> None:
    """Keys, values and states of one sequence, copied to two others; a fourth stays unchanged."""
    cache, places = KVCache(_COPIED, 4), [3, 0]
    layer = [run.operand(normal(name, 4 * _COPIED, columns)) for name in ("keys", "values")]
    cache.layers.append((layer[0], layer[1]))
    cache.states += [run.float32(normal("state", 4 * 3, 16))] if has_state else []
    expected = [run.rounded(normal(name, 4 * _COPIED, columns)) for name in ("keys", "values")]
    expected += [rounded(normal("state", 4 * 3, 16), "float32")] if has_state else []
    for kept in expected:
        rows = kept.reshape(4, -1, kept.shape[-1])
        count = tokens if len(kept) == 4 * _COPIED else rows.shape[1]
        rows[places, :count] = rows[1, :count]
    copies = copy_sequence(run.graph, cache)
    assert copies.storage is not None
    copies.storage.data = np.zeros(copies.columns, np.uint32)
    given = encode_copies(1, tokens, places)
    copies.storage.data[: len(given)] = given
    kept_tensors = [*layer, *cache.states]
    for got, each_expected in zip(run.run(*kept_tensors), expected, strict=True):
        run.compare(got, each_expected)


def check_logits_of_a_prompt(run: Runner) -> None:
    """The logits of one row of a prefill's hidden states."""
    rows = np.array([4])
    batch = cached_batch(KVCache(8), np.ones((1, 6), np.int64), rows=rows)
    _compare_logits(run, dense(run, normal("w", 141, 72)), batch, rows)


def _compare_logits(
    run: Runner, head: tuple[DenseMatrix, Array], batch: BatchBuffers, rows: np.ndarray
) -> None:
    matrix, w = head
    x = normal("x", batch.rows, matrix.columns)
    logits = logits_of_rows(run.graph, run.operand(x), Head(matrix, 0.5), batch, 0, len(rows))
    (got,) = run.run(logits)
    run.compare(got, 0.5 * run.rounded(x)[rows] @ w.T)


@each(
    ("double", 64, 3, 8, True, False),
    ("NF4", 320, 37, 4, True, False),
    ("Q4_K", 256, 1, 0, True, False),
    ("INT4 with zeros", 96, 2, 8, True, False),
    ("MXFP4", 96, 1, 0, True, False),
    ("double", 320, 37, 8, True, True),
    ("Q5_K", 256, 1, 0, True, True),
    ("double", 64, 1, 8, False, True),
)
def check_packed_weights(
    run: Runner, form: str, inner: int, rows: int, r: int, has_bias: bool, of_numbers: bool
) -> None:
    """A quantized layer with a residual, packed as codes or dequantized."""
    layers, store = _stored_layers(
        run, form, {"q_proj": 141}, inner, r, has_bias=has_bias, dense=of_numbers
    )
    compare_layers(run, layers, [reading(rows, store)], "residual", exact=None)


@each(
    (False, 8, "qkv", False),
    (True, 0, "qkv", False),
    (True, 8, "kv", False),
    (True, 8, "qkv", True),
)
def check_packed_weights_of_a_group(
    run: Runner, of_numbers: bool, r: int, letters: str, exact_type: bool
) -> None:
    """Two or three stacked layers of one input; float32 ones have biases."""
    letters = letters[: most_layers(run.graph, with_bias=exact_type, with_lora=r > 0)]
    rows = (136, 24, 40)[-len(letters) :]
    outer = {f"{name}_proj": own for name, own in zip(letters, rows, strict=True)}
    layers, store = _stored_layers(
        run, "double", outer, 64, r, has_bias=exact_type, dense=of_numbers
    )
    batches, flags = [reading(3, store)] * len(outer), [exact_type] * len(outer)
    compare_layers(run, layers, batches, exact=None, group=flags)


@each(
    ("silu", 136, 72, 8, False),
    ("gelu", 64, 41, 8, True),
    ("gelu_pytorch_tanh", 200, 1, 8, True),
    ("relu2", 8, 2, 8, False),
    ("silu", 200, 1, 8, True),
)
def check_glu_of_packed_weights(
    run: Runner, activation: str, outer: int, rows: int, r: int, of_numbers: bool
) -> None:
    """A gated unit of two layers of one input, which do not start at whole strips."""
    sizes = {"gate_proj": outer, "up_proj": outer}
    layers, store = _stored_layers(run, "double", sizes, 64, r, dense=of_numbers, scaling=1)
    x = 0.1 * normal("x", rows, 64)
    gate, up = linear_group(run.graph, run.operand(x), layers.linears, reading(rows, store))
    y = glu(run.graph, gate, up, activation)
    (got,) = run.run(y)
    gates, ups = layers.formula(run.rounded(x), layers.adapter and layers.adapter[1])
    # float32 sums may be rounded to neighbours of the exact results.
    dgates, dups = grads(pointwise_reference.glu, np.ones_like(got), gates, ups, activation, of=2)
    off = np.abs(dgates * gates) + np.abs(dups * ups)
    expected = pointwise_reference.glu(run.rounded(gates), run.rounded(ups), activation)
    run.compare(got, expected, y.dtype, inner=2.0 * ROUNDING[y.dtype] * off)


@each((72, 3), (64, 1))
def check_logits_of_packed_weights(run: Runner, inner: int, rows: int) -> None:
    """A head in two shards."""
    head, store = dense(run, normal("w", 141, inner), 72), PackedWeightCache()
    for _, shard in head[0].resident:
        store.of_dense(run.graph, shard)
    store.fill(run.graph)
    _compare_logits(run, head, reading(rows, store), np.arange(rows))


_CAPACITY = 5  # tokens per sequence


def compare_rotated(
    run: Runner,
    cache: KVCache,
    past: np.ndarray,
    places: np.ndarray,
    dims: tuple[int, int],
    make: Callable[[BatchBuffers], Sequence[Tensor]],
    exact: Sequence[Array],
    near: Sequence[float],
    *,
    by_rows: bool,
    alone: bool = False,
) -> None:
    """Compares rotated queries and keys of sequences at these places, and the cache's contents.

    Tokens beyond its capacity are not stored. ``make`` returns queries, keys and values that are
    ``exact`` within a relative tolerance; they are rotated by their positions, or ``by_rows`` by
    other angles, together or ``alone``.
    """
    g, texts = run.graph, len(past)
    batch = cached_batch(cache, np.ones_like(past), past=past, places=places)
    rows = np.arange(texts) % 3 if by_rows else past.ravel()
    numbers = Storage("rows", "check", 4 * texts, rows.astype(np.uint32))
    told = vector("rows", texts, "uint32", numbers) if by_rows else None
    table = normal("table", _CAPACITY + 1, dims[1] // 2, 2)
    constant, ys = g.constant("table", table.astype(np.float32)), list[Tensor]()
    q, k, v = make(batch)
    for some in ([q], [k]) if alone else ([q, k],):
        ys += rope(g, some, constant, batch, *dims, rows=told)
    assert batch.cache is not None
    layer = batch.cache.next_layer(run.dtype, v.columns, g.max_binding * g.profile.textures)
    append(g, (ys[1], v), layer, batch)
    got_q, *kept = run.run(ys[0], *cache.layers[0])
    off = [share * np.abs(each) for share, each in zip(near, exact, strict=True)]
    turned = [run.rounded(y) for y in exact]
    for n in range(2):
        turned[n] = attention_reference.rope(turned[n], rows, table, *dims)
        both = (np.abs(table) * signs for signs in ([1.0, 1.0], [1.0, -1.0]))  # for a pair
        off[n] = np.maximum(*(attention_reference.rope(off[n], rows, own, *dims) for own in both))
    run.compare(got_q, turned[0], run.dtype, by_row=True, inner=off[0])
    is_kept = (past < cache.capacity).ravel()
    at = (places * cache.capacity + past).ravel()[is_kept]
    for got, given, inner in zip(kept, turned[1:], off[1:], strict=True):
        run.compare(got[at], given[is_kept], run.dtype, by_row=True, inner=inner[is_kept])
        others = np.delete(got, at, axis=0)
        run.compare_exactly(others, np.zeros_like(others))


@each(
    (16, (4, 2), 3, 8, True, False, False),
    (16, (3, 3), 11, 0, True, True, True),
    (32, (6, 2), 1, 16, False, False, False),
    (32, (4, 2), 1, 8, True, False, False),
    (64, (4, 2), 1, 8, True, False, False),
    (128, (4, 2), 1, 8, True, False, False),
)
def check_rotated_product(
    run: Runner,
    head_dim: int,
    heads: tuple[int, int],
    texts: int,
    r: int,
    of_numbers: bool,
    has_bias: bool,
    by_rows: bool,
) -> None:
    """Sequences at different places, one beyond its capacity, which is not stored."""
    outer = {f"{name}_proj": head_dim * heads[name != "q"] for name in "qkv"}
    layers, store = _stored_layers(
        run, "double", outer, 64, r, has_bias=has_bias, dense=of_numbers, scaling=1
    )
    x = 0.1 * normal("x", texts, 64)

    def make(batch: BatchBuffers) -> list[Tensor]:
        return linear_group(run.graph, run.operand(x), layers.linears, _reads(batch, store))

    exact = layers.formula(run.rounded(x), layers.adapter and layers.adapter[1])
    past = (3 + 2 * np.arange(texts)[:, None]) % (_CAPACITY + 1)
    where = KVCache(_CAPACITY, texts), past, np.arange(texts)[::-1, None]
    # Results may be rounded to neighbours of the exact sums' rounding.
    near = [2.0 * ROUNDING[run.dtype]] * 3
    compare_rotated(run, *where, (head_dim, head_dim), make, exact, near, by_rows=by_rows)
