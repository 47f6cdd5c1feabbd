"""Linear layers of new tokens, whose weights are decoded on the way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from qlora_wgpu.config import LoraConfig
from qlora_wgpu.families.family import LinearSpec
from qlora_wgpu.graph.tensor import Storage
from qlora_wgpu.model.batch_encoding import encode_batch
from qlora_wgpu.model.quantized_weights import device_arrays, lay_out, words
from qlora_wgpu.ops.batch import BatchBuffers, make_batch_buffers
from qlora_wgpu.ops.kv_cache import CacheView, KVCache
from qlora_wgpu.ops.linear import linear, linear_group
from qlora_wgpu.ops.logits import logits_of_rows
from qlora_wgpu.ops.modules import DenseMatrix, Head, Linear
from qlora_wgpu.ops.norms import rms_norm
from qlora_wgpu.ops.quantized import QuantizedMatrix
from qlora_wgpu.quant import QuantizedWeight, quantize_nf4
from qlora_wgpu.reference import linear as linear_reference
from qlora_wgpu.reference import norms as norms_reference
from qlora_wgpu.selfcheck.cases.common import each, filled_adapter, normal, uneven
from qlora_wgpu.selfcheck.cases.formats import FORMS, random_weight
from qlora_wgpu.selfcheck.cases.groups import in_one_storage
from qlora_wgpu.selfcheck.runner import Runner, rounded


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
