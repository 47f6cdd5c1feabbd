"""Products of few rows, as of new tokens: with weights, with packed weights, and fused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from qlora_wgpu.config import LoraConfig
from qlora_wgpu.families.family import LinearSpec
from qlora_wgpu.graph.tensor import Storage, Tensor, vector
from qlora_wgpu.model.batch_encoding import encode_batch
from qlora_wgpu.model.quantized_weights import device_arrays, lay_out, words
from qlora_wgpu.ops.attention import append
from qlora_wgpu.ops.batch import BatchBuffers, make_batch_buffers
from qlora_wgpu.ops.kv_cache import CacheView, KVCache
from qlora_wgpu.ops.linear import linear, linear_group, most_layers
from qlora_wgpu.ops.logits import logits_of_rows
from qlora_wgpu.ops.modules import DenseMatrix, Head, Linear
from qlora_wgpu.ops.norms import rms_norm
from qlora_wgpu.ops.pointwise import glu
from qlora_wgpu.ops.quantized import PackedWeightCache, QuantizedMatrix
from qlora_wgpu.ops.rope import rope
from qlora_wgpu.quant import QuantizedWeight, quantize_nf4
from qlora_wgpu.reference import attention as attention_reference
from qlora_wgpu.reference import linear as linear_reference
from qlora_wgpu.reference import norms as norms_reference
from qlora_wgpu.reference import pointwise as pointwise_reference
from qlora_wgpu.reference.tape import grads
from qlora_wgpu.selfcheck.cases.common import each, filled_adapter, normal, uneven
from qlora_wgpu.selfcheck.cases.formats import FORMS, random_weight
from qlora_wgpu.selfcheck.cases.linear import in_one_storage
from qlora_wgpu.selfcheck.runner import ROUNDING, Array, Runner, rounded


def new_tokens(count: int, past: int = 0) -> BatchBuffers:
    """A batch of so many texts' next tokens, at most four of each with those that came before."""
    batch = make_batch_buffers(count, 1, CacheView(KVCache(4, count)))
    ids = np.zeros((count, 1), np.int64)
    places = np.arange(count)[:, None]
    batch.storage.data = encode_batch(batch, ids, ids + 1, past=past, places=places)
    return batch


def stored_weight(form: str, rows: int, columns: int, number: int = 0) -> QuantizedWeight:
    """A weight of a form, another one for each number."""
    if form in FORMS:
        first = random_weight(FORMS[form], (rows, columns))
        return replace(first, codes=np.roll(first.codes, number))
    values = normal(f"{form} {number}", rows, columns).astype(np.float32)
    return quantize_nf4(values, 64, form == "double")


def in_one_range(weights: list[QuantizedWeight], whole: Storage) -> list[QuantizedMatrix]:
    """Matrices whose parts lie in one storage, as those of a layer do."""
    matrices = []
    for weight in weights:
        matrix, storages = lay_out("w", weight.shape, weight.format, 1, whole.part, None)
        arrays = device_arrays(weight)
        for leaf, storage in storages.items():
            storage.data = words(arrays[leaf])
        matrices.append(matrix)
    return matrices


@each(
    ("double", 64, 3, 8, True),
    ("NF4", 72, 9, 5, False),
    ("Q5_K", 256, 1, 0, True),
    ("AWQ", 96, 2, 8, False),
    ("LLM.int8", 72, 1, 0, False),
    ("FP8", 96, 2, 0, True),
    ("dense", 104, 1, 8, True),
    ("dense", 90, 9, 3, False),
)
def check_few_rows(run: Runner, form: str, inner: int, rows: int, r: int, is_whole: bool) -> None:
    """A layer of few rows: with an adapter if r is not 0, with bias and residual if it is whole."""
    outer = 141
    spec = LinearSpec("model.layers.0.q_proj", outer, inner)
    adapter, parts = filled_adapter(LoraConfig(r=max(r, 1), lora_alpha=2 * max(r, 1)), [spec])
    a, b = (array * (r > 0) for array in parts.values())
    if form == "dense":
        w = run.rounded_weight(normal("w", outer, inner))
        first, second = run.weight(w[:64]), run.weight(w[64:])
        weight = DenseMatrix(outer, inner, ((0, first), (64, second)))
        layer = Linear(spec.name, weight, None, None)
    else:
        stored = stored_weight(form, outer, inner)
        (matrix,) = in_one_range([stored], Storage("group", "check", 256))
        w = stored.dequantize().astype(np.float64)
        if inner % 8:  # decoded before
            w = run.rounded_weight(w)
        layer = Linear(spec.name, matrix, None, None)
    bias = normal("bias", outer) * is_whole
    residual = normal("residual", rows, outer) * is_whole
    layer = replace(
        layer,
        lora=adapter.loras[spec.name] if r else None,
        bias=run.float32(bias) if is_whole else None,
    )
    x = normal("x", rows, inner)
    given = run.float32(residual) if is_whole else None
    y = linear(run.graph, run.operand(x), layer, new_tokens(rows), given)
    (got,) = run.run(y)
    x = run.rounded(x)
    exact = linear_reference.linear(x, w, a, b, 2.0, np.ones_like(x), bias) + residual
    run.compare(got, exact, y.dtype)


@each(("double", 64, 8, False, 3), ("NF4", 64, 0, True, 2))
def check_few_rows_of_a_group(
    run: Runner, form: str, inner: int, r: int, has_bias: bool, count: int
) -> None:
    """Layers of one input as one product, their matrices in one range of a storage."""
    names = [f"model.layers.0.{name}_proj" for name in "qkv"[:count]]
    outer, rows = (136, 24, 40)[:count], 3
    specs = [LinearSpec(n, columns, inner) for n, columns in zip(names, outer, strict=True)]
    adapter, parts = filled_adapter(LoraConfig(r=max(r, 1), lora_alpha=2 * max(r, 1)), specs)
    stored = [stored_weight(form, columns, inner, n) for n, columns in enumerate(outer)]
    matrices = in_one_range(stored, Storage("group", "check", 256))
    biases = [normal(f"bias of {name}", n) * has_bias for name, n in zip(names, outer, strict=True)]
    tensors = in_one_storage(biases) if has_bias else [None] * count
    layers = [
        Linear(name, matrix, bias, adapter.loras[name] if r else None)
        for name, matrix, bias in zip(names, matrices, tensors, strict=True)
    ]
    x = normal("x", rows, inner)
    flags = [index == 1 for index in range(count)]
    ys = linear_group(run.graph, run.operand(x), layers, new_tokens(rows), flags)
    got = run.run(*ys)
    x = run.rounded(x)
    for index, (name, weight) in enumerate(zip(names, stored, strict=True)):
        a, b = (parts[n] * (r > 0) for n in parts if name in n)
        w = weight.dequantize().astype(np.float64)
        exact = linear_reference.linear(x, w, a, b, 2.0, np.ones_like(x), biases[index])
        run.compare(got[index], exact, ys[index].dtype)


@each((72, 3, 5, False), (1200, 1, 16, False), (40, 2, 8, True))
def check_norm_and_down(run: Runner, inner: int, rows: int, r: int, of_operand: bool) -> None:
    """The norm of a layer's input, with the adapter's u of it: rows of unlike sizes."""
    outer = 24
    spec = LinearSpec("model.layers.0.q_proj", outer, inner)
    adapter, parts = filled_adapter(LoraConfig(r=r, lora_alpha=2 * r), [spec])
    w, h = run.rounded_weight(normal("w", outer, inner)), uneven("h", rows, inner)
    matrix = DenseMatrix(outer, inner, ((0, run.weight(w)),))
    weight = rounded(1 + 0.1 * normal("norm", inner), "float32")
    given, h = (run.operand(h), run.rounded(h)) if of_operand else (run.float32(h), h)
    x = rms_norm(run.graph, given, run.float32(weight), 1e-5)
    layer = Linear(spec.name, matrix, None, adapter.loras[spec.name])
    y = linear(run.graph, x, layer, new_tokens(rows), float32=True)
    got_x, got_y = run.run(x, y)
    normed = norms_reference.rms_norm(rounded(h, "float32"), weight, 1e-5)
    run.compare(got_x, normed, x.dtype, by_row=True)
    a, b = parts.values()
    exact = linear_reference.linear(got_x, w, a, b, 2.0, np.ones_like(got_x))
    run.compare(got_y, exact)


def check_logits_of_a_prompt(run: Runner) -> None:
    """The logits of one row of a prompt's hidden states."""
    hidden, vocab, tokens, row = 72, 141, 6, 4
    batch = make_batch_buffers(1, tokens, CacheView(KVCache(8)))
    mask = np.ones((1, tokens), np.int64)
    batch.storage.data = encode_batch(batch, np.zeros_like(mask), mask, rows=np.array([row]))
    x, w = normal("x", tokens, hidden), normal("w", vocab, hidden)
    head = Head(DenseMatrix(vocab, hidden, ((0, run.weight(w)),)), 0.5)
    logits = logits_of_rows(run.graph, run.operand(x), head, batch, 0, 1)
    (got,) = run.run(logits)
    run.compare(got, 0.5 * run.rounded(x)[row : row + 1] @ run.rounded_weight(w).T)


def reading_strips(count: int, store: PackedWeightCache) -> BatchBuffers:
    """A batch of so many texts' next tokens, which read packed weights."""
    batch = new_tokens(count)
    assert batch.cache is not None
    batch.cache.packed_weights = store
    return batch


@each(
    ("double", 64, 3, 8, False),
    ("NF4", 320, 24, 4, False),
    ("Q4_K", 256, 1, 0, False),
    ("INT4 with zeros", 96, 2, 8, False),
    ("MXFP4", 96, 1, 0, False),
    ("double", 320, 24, 8, True),
    ("Q5_K", 256, 1, 0, True),
)
def check_strips(run: Runner, form: str, inner: int, rows: int, r: int, dense: bool) -> None:
    """A quantized layer with bias and residual, of codes or of numbers (``dense``)."""
    outer = 141
    spec = LinearSpec("model.layers.0.q_proj", outer, inner)
    adapter, parts = filled_adapter(LoraConfig(r=max(r, 1), lora_alpha=2 * max(r, 1)), [spec])
    a, b = (array * (r > 0) for array in parts.values())
    stored = stored_weight(form, outer, inner)
    (matrix,) = in_one_range([stored], Storage("group", "check", 256))
    store = PackedWeightCache(dense=dense)
    store.of_quantized(run.graph, [matrix])
    store.fill(run.graph)
    bias, residual = normal("bias", outer), normal("residual", rows, outer)
    lora = adapter.loras[spec.name] if r else None
    layer = Linear(spec.name, matrix, run.float32(bias), lora)
    x = normal("x", rows, inner)
    given = run.float32(residual)
    y = linear(run.graph, run.operand(x), layer, reading_strips(rows, store), given)
    (got,) = run.run(y)
    w, x = multiplied(run, stored, dense=dense), run.rounded(x)
    exact = linear_reference.linear(x, w, a, b, 2.0, np.ones_like(x), bias) + residual
    run.compare(got, exact, y.dtype)


def multiplied(run: Runner, stored: QuantizedWeight, *, dense: bool) -> Array:
    """A quantized matrix as products with packed weights have it."""
    w = stored.dequantize().astype(np.float64)
    return run.rounded_weight(w) if dense and run.graph.profile.textures else w


@each(
    (False, 8, "qkv", False),
    (True, 0, "qkv", False),
    (True, 8, "kv", False),
    (True, 8, "qkv", True),
)
def check_strips_of_a_group(
    run: Runner, dense: bool, r: int, letters: str, exact_type: bool
) -> None:
    """Two or three layers of one input, one below the other; with biases where in float32."""
    letters = letters[: most_layers(run.graph, with_bias=exact_type, with_lora=r > 0)]
    names = [f"model.layers.0.{name}_proj" for name in letters]
    outer, rows, inner = (136, 24, 40)[-len(names) :], 3, 64
    specs = [LinearSpec(n, columns, inner) for n, columns in zip(names, outer, strict=True)]
    adapter, parts = filled_adapter(LoraConfig(r=max(r, 1), lora_alpha=2 * max(r, 1)), specs)
    stored = [stored_weight("double", columns, inner, n) for n, columns in enumerate(outer)]
    matrices = in_one_range(stored, Storage("group", "check", 256))
    store = PackedWeightCache(dense=dense)
    store.of_quantized(run.graph, matrices)
    store.fill(run.graph)
    biases = [normal(f"bias {n}", columns) * exact_type for n, columns in enumerate(outer)]
    given = in_one_storage(biases) if exact_type else [None for _ in names]
    layers = [
        Linear(name, matrix, bias, adapter.loras[name] if r else None)
        for name, matrix, bias in zip(names, matrices, given, strict=True)
    ]
    x, flags = normal("x", rows, inner), [exact_type for _ in names]
    ys = linear_group(run.graph, run.operand(x), layers, reading_strips(rows, store), flags)
    got = run.run(*ys)
    x = run.rounded(x)
    for index, (name, weight) in enumerate(zip(names, stored, strict=True)):
        a, b = (parts[n] * (r > 0) for n in parts if name in n)
        w = multiplied(run, weight, dense=dense)
        exact = linear_reference.linear(x, w, a, b, 2.0, np.ones_like(x), biases[index])
        run.compare(got[index], exact, ys[index].dtype)


@each(
    ("silu", 136, 72, 8, False),
    ("gelu", 64, 9, 0, True),
    ("gelu_pytorch_tanh", 200, 1, 8, True),
    ("relu2", 8, 2, 8, False),
)
def check_glu_of_strips(
    run: Runner, activation: str, outer: int, rows: int, r: int, dense: bool
) -> None:
    """A gated unit of two layers of one input, which do not begin at whole strips."""
    names, inner = [f"model.layers.0.{name}_proj" for name in ("gate", "up")], 64
    specs = [LinearSpec(name, outer, inner) for name in names]
    adapter, parts = filled_adapter(LoraConfig(r=max(r, 1), lora_alpha=max(r, 1)), specs)
    stored = [stored_weight("double", outer, inner, n) for n in range(2)]
    matrices = in_one_range(stored, Storage("group", "check", 256))
    store = PackedWeightCache(dense=dense)
    store.of_quantized(run.graph, matrices)
    store.fill(run.graph)
    layers = [
        Linear(name, matrix, None, adapter.loras[name] if r else None)
        for name, matrix in zip(names, matrices, strict=True)
    ]
    x = 0.1 * normal("x", rows, inner)
    gate, up = linear_group(run.graph, run.operand(x), layers, reading_strips(rows, store))
    y = glu(run.graph, gate, up, activation)
    (got,) = run.run(y)
    x, exact = run.rounded(x), []
    for name, weight in zip(names, stored, strict=True):
        a, b = (parts[n] * (r > 0) for n in parts if name in n)
        w = multiplied(run, weight, dense=dense)
        exact.append(linear_reference.linear(x, w, a, b, 1.0, np.ones_like(x)))
    gates, ups = exact
    # Sums of float32 may be rounded to the neighbours of what exact ones are.
    dgates, dups = grads(pointwise_reference.glu, np.ones_like(got), gates, ups, activation, of=2)
    off = np.abs(dgates * gates) + np.abs(dups * ups)
    expected = pointwise_reference.glu(run.rounded(gates), run.rounded(ups), activation)
    run.compare(got, expected, y.dtype, inner=2.0 * ROUNDING[y.dtype] * off)


def check_logits_of_strips(run: Runner) -> None:
    """A head in two pieces."""
    hidden, vocab, rows, first = 72, 141, 3, 64
    x, w = normal("x", rows, hidden), normal("w", vocab, hidden)
    upper, lower = run.weight(w[:first]), run.weight(w[first:])
    store = PackedWeightCache()
    for piece in (upper, lower):
        store.of_dense(run.graph, piece)
    store.fill(run.graph)
    head = Head(DenseMatrix(vocab, hidden, ((0, upper), (first, lower))), 0.5)
    batch = reading_strips(rows, store)
    logits = logits_of_rows(run.graph, run.operand(x), head, batch, 0, rows)
    (got,) = run.run(logits)
    run.compare(got, 0.5 * run.rounded(x) @ run.rounded_weight(w).T)


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
    """Texts at unlike places, one of them past its capacity, of which nothing is kept."""
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
    store = PackedWeightCache(dense=dense)
    store.of_quantized(g, matrices)
    store.fill(g)
    assert batch.cache is not None
    batch.cache.packed_weights = store
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
