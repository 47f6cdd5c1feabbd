"""Products of new tokens with copies of the weights in strips, where a profile has those."""

from __future__ import annotations

import numpy as np

from qlora_wgpu.config import LoraConfig
from qlora_wgpu.families.family import LinearSpec
from qlora_wgpu.graph.tensor import Storage
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.linear import linear, linear_group, most_layers
from qlora_wgpu.ops.logits import logits_of_rows
from qlora_wgpu.ops.modules import DenseMatrix, Head, Linear
from qlora_wgpu.ops.pointwise import glu
from qlora_wgpu.ops.quantized import StripStore
from qlora_wgpu.quant import QuantizedWeight
from qlora_wgpu.reference import linear as linear_reference
from qlora_wgpu.reference import pointwise as pointwise_reference
from qlora_wgpu.reference.tape import grads
from qlora_wgpu.selfcheck.cases.common import each, filled_adapter, normal
from qlora_wgpu.selfcheck.cases.few_rows import in_one_range, new_tokens, stored_weight
from qlora_wgpu.selfcheck.cases.groups import in_one_storage
from qlora_wgpu.selfcheck.runner import ROUNDING, Array, Runner


def reading_strips(count: int, store: StripStore) -> BatchBuffers:
    """A batch of so many texts' next tokens, which read strips."""
    batch = new_tokens(count)
    assert batch.cache is not None
    batch.cache.strips = store
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
    store = StripStore(dense=dense)
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
    """A quantized matrix as the products of strips have it."""
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
    store = StripStore(dense=dense)
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
    store = StripStore(dense=dense)
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
    store = StripStore()
    for piece in (upper, lower):
        store.of_dense(run.graph, piece)
    store.fill(run.graph)
    head = Head(DenseMatrix(vocab, hidden, ((0, upper), (first, lower))), 0.5)
    batch = reading_strips(rows, store)
    logits = logits_of_rows(run.graph, run.operand(x), head, batch, 0, rows)
    (got,) = run.run(logits)
    run.compare(got, 0.5 * run.rounded(x) @ run.rounded_weight(w).T)
