"""A mixture of experts: routing, the experts' layers, and what comes back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from qlora_wgpu.config import LoraConfig
from qlora_wgpu.families.family import ExpertSpec
from qlora_wgpu.graph.tensor import Storage
from qlora_wgpu.kernels.common import EXPERT_TILE
from qlora_wgpu.kernels.dequantize import fits_words
from qlora_wgpu.model.quantized_weights import (
    codebook_tensor,
    device_arrays,
    lay_out,
    words,
)
from qlora_wgpu.ops.experts import expert_linear, with_factors
from qlora_wgpu.ops.modules import DenseExperts, ExpertLinear, ExpertMatrix
from qlora_wgpu.ops.pointwise import ClampedGLU, clamped_glu
from qlora_wgpu.ops.routing import combine, permute, route
from qlora_wgpu.quant import quantize_nf4
from qlora_wgpu.reference import experts as experts_reference
from qlora_wgpu.reference import pointwise as pointwise_reference
from qlora_wgpu.reference.tape import grad, grads
from qlora_wgpu.selfcheck.cases.common import (
    each,
    filled_adapter,
    joined,
    normal,
    whole_gradient,
)
from qlora_wgpu.selfcheck.runner import ROUNDING, Array, Runner

_MANY, _EXPERTS, _TOP_K = 150, 6, 2
_NAMES = ("gate_proj", "up_proj")


def _logits(rows: int) -> Array:
    """Router's outputs: of one row, or so that experts have whole tiles, one row more, or none.

    Some of the chosen are equal, and some are equal to the best that is not chosen. Of some rows
    all are below the zeros that pad a row.
    """
    chosen = np.repeat([2, 0, 3, 4, 5], [128, 65, 64, 42, 1]).reshape(2, _MANY)[:, -rows:]
    logits = 0.5 * normal("logits", rows, _EXPERTS)
    row = np.arange(rows)
    for ids in chosen:
        logits[row, ids] += 6.0
    logits[row[1::5], chosen[0, 1::5]] = logits[row[1::5], chosen[1, 1::5]]
    lowest = np.minimum(logits[row, chosen[0]], logits[row, chosen[1]])
    logits[2:-1:5, 5] = lowest[2:-1:5]
    logits[::3] -= 12.0
    exact: Array = logits.astype(np.float32).astype(np.float64)
    return exact


def _dense(run: Runner, w: Array) -> tuple[ExpertMatrix, Array]:
    """Experts in two shards, and their weights as they are held."""
    experts, outer, inner = w.shape
    pieces = tuple(
        (first, count, run.weight(w[first : first + count].reshape(-1, inner)))
        for first, count in ((0, 2), (2, 4))
    )
    return DenseExperts(experts, outer, inner, pieces), run.rounded_weight(w)


def _quantized(run: Runner, w: Array, double: bool = False) -> tuple[ExpertMatrix, Array]:
    """Experts of 4 bits, two at a time, and their weights as they are decoded."""
    parts = [quantize_nf4(part.astype(np.float32), 64, double) for part in w]
    form, codebook = parts[0].format, None
    if run.graph.profile.textures and fits_words(form, w.shape[2]):
        codebook = codebook_tensor(form, Storage)

    def keep(label: str, nbytes: int) -> Storage:
        return Storage(label, "check", nbytes)

    matrix, storages = lay_out("w", w.shape[1:], form, len(w), keep, codebook)
    for leaf, storage in storages.items():
        each_one = [words(device_arrays(part)[leaf]) for part in parts]
        size = storage.nbytes // 4 // len(w)
        storage.data = np.stack([np.pad(a, (0, size - a.size)) for a in each_one])
    run.graph.max_binding = 2 * run.weight(np.zeros(w.shape[1:])).nbytes
    held = np.stack([run.rounded_weight(part.dequantize().astype(np.float64)) for part in parts])
    return matrix, held


_STORED: dict[str, Callable[[Runner, Array], tuple[ExpertMatrix, Array]]] = {
    "dense": _dense,
    "nf4": _quantized,
    "double": partial(_quantized, double=True),
}


@each(
    (36, 20, "dense", True, True),
    (36, 20, "dense", True, True, _MANY, True),
    (36, 20, "dense", True, False),
    (36, 20, "dense", False, False),
    (36, 20, "dense", True, False, 1),
    (36, 20, "dense", False, False, 1),
    (36, 68, "dense", False, True),
    (96, 68, "nf4", True, False),
    (96, 68, "nf4", True, False, _MANY, True),
    (36, 20, "nf4", False, False),
    (64, 20, "double", True, True),
    (36, 68, "double", True, True),
)
def check_experts(
    run: Runner,
    inner: int,
    outer: int,
    storage: str,
    normalized: bool,
    has_adapter: bool,
    rows: int = _MANY,
    has_bias: bool = False,
) -> None:
    """Two layers of all experts, added up: y, dx, and the gradients of router and adapter."""
    g = run.graph
    x, dy, skip = (
        normal("x", rows, inner),
        normal("dy", rows, outer),
        normal("skip", rows, outer),
    )
    stacks = [ExpertSpec("mlp.experts", name, _EXPERTS, outer, inner) for name in _NAMES]
    config = LoraConfig(r=11, lora_alpha=11, target_modules=list(_NAMES))
    adapter, parts = filled_adapter(config, [], stacks)
    logits = _logits(rows)
    tx, tlogits = run.operand(x, grad=True), run.float32(logits, grad=True)
    routing = route(g, tlogits, _TOP_K, normalized=normalized)
    batch, permuted = run.batch(np.ones((1, rows), np.int64)), permute(g, tx, routing)
    y, full, factors, biases = run.float32(skip), [], [], []
    for stack in stacks:
        w = normal(f"w of {stack.leaf}", _EXPERTS, outer, inner)
        weight, held = _STORED[storage](run, w)
        lora = adapter.expert_loras[stack.name] if has_adapter else None
        bias = normal(f"bias of {stack.leaf}", _EXPERTS, outer) if has_bias else None
        given = None if bias is None else run.float32(bias)
        layer = ExpertLinear("up", weight, lora, given)
        made = expert_linear(g, permuted, layer, routing, batch)
        biases.append(bias)
        y = combine(g, made, routing, y)
        names = sorted(n for n in parts if stack.leaf in n)
        a, b = (np.stack([parts[n] for n in names if leaf in n]) for leaf in ("lora_A", "lora_B"))
        full.append(held + has_adapter * (b @ a))
        factors.append((names, a, b))
    gradients = run.gradients(y, run.float32(dy), tx, tlogits)
    flat = [whole_gradient(adapter)] if has_adapter else []
    places = routing.slots, routing.tiles.rows
    got_slots, got_rows, got_y, got_x, got_logits, *got_flat = run.run(
        *places, y, *gradients, *flat
    )
    x = run.rounded(x)
    ids, weights = experts_reference.route(logits, _TOP_K, normalized=normalized)
    # Slots past an expert's own may be harmless in one memory and not in another.
    slots, ends = experts_reference.slots_of(ids, _EXPERTS, EXPERT_TILE)
    run.compare_exactly(got_slots, slots.astype(np.float64))
    run.compare_exactly(got_rows, ends.ravel().astype(np.float64))
    total, dtotal, dweights = skip, np.zeros_like(x), np.zeros_like(weights)
    by_name: dict[str, Array] = {}
    for w, bias, (names, a, b) in zip(full, biases, factors, strict=True):
        total = total + experts_reference.mix(x, ids, weights, w, bias)
        dx, dw_part, dw = grads(experts_reference.mix, dy, x, ids, weights, w, bias, of=(0, 2, 3))
        dtotal, dweights = dtotal + dx, dweights + dw_part
        both = (("lora_A", np.swapaxes(b, 1, 2) @ dw), ("lora_B", dw @ np.swapaxes(a, 1, 2)))
        for leaf, exact in both:
            by_name |= dict(zip([n for n in names if leaf in n], exact, strict=True))
    # What experts make, and what comes back to them, are operands.
    run.compare(got_y, total, inner=ROUNDING[run.dtype])
    run.compare(got_x, dtotal, inner=ROUNDING[run.dtype])
    exact = grad(experts_reference.softmax_weights, dweights, logits, ids, normalized=normalized)
    run.compare(got_logits, exact, inner=ROUNDING[run.dtype])
    for values in got_flat:
        run.compare(values, joined(adapter, by_name), inner=ROUNDING[run.dtype])


@each((True,), (False,))
def check_factors(run: Runner, exact_gradient: bool) -> None:
    """Weights times factors of experts, with a gradient of each type."""
    logits, factors, dy = _logits(_MANY), normal("factors", _EXPERTS), normal("dy", _MANY, _TOP_K)
    tlogits = run.float32(logits, grad=True)
    routing = route(run.graph, tlogits, _TOP_K, normalized=True)
    y = with_factors(run.graph, routing, run.float32(factors)).weights
    cotangent = run.float32(dy) if exact_gradient else run.operand(dy)
    (dlogits,) = run.gradients(y, cotangent, tlogits)
    got_y, got_dlogits = run.run(y, dlogits)
    dy = dy if exact_gradient else run.rounded(dy)
    ids, weights = experts_reference.route(logits, _TOP_K, normalized=True)
    run.compare(got_y, experts_reference.with_factors(weights, ids, factors))
    dweights = experts_reference.with_factors(dy, ids, factors)
    exact = grad(experts_reference.softmax_weights, dweights, logits, ids, normalized=True)
    run.compare(got_dlogits, exact)


@each((True,), (False,))
def check_clamped_glu(run: Runner, exact_gradient: bool) -> None:
    """gpt-oss's gated unit, within its limits and beyond, with a gradient of each type."""
    scalars = ClampedGLU(swiglu_limit=2.0, swiglu_alpha=1.5)
    gate, up, dy = (normal(name, 70, 52) for name in ("gate", "up", "dy"))
    gate, up = 2 * gate, 2 * up
    gate[:, ::5] = np.linspace(-60, 60, gate[:, ::5].size).reshape(70, -1)
    gate[:3, 1], up[:3, 1], up[3:6, 1] = 2.0, 2.0, -2.0  # at the limits themselves
    tensors = [run.operand(gate, grad=True), run.operand(up, grad=True)]
    y = clamped_glu(run.graph, tensors[0], tensors[1], scalars)
    cotangent = run.float32(dy) if exact_gradient else run.operand(dy)
    gradients = run.gradients(y, cotangent, *tensors)
    got = run.run(y, *gradients)
    dy = dy if exact_gradient else run.rounded(dy)
    gate, up = run.rounded(gate), run.rounded(up)
    run.compare(got[0], pointwise_reference.clamped_glu(gate, up, 2.0, 1.5), y.dtype)
    expected = grads(pointwise_reference.clamped_glu, dy, gate, up, 2.0, 1.5, of=2)
    for value, exact, gradient in zip(got[1:], expected, gradients, strict=True):
        run.compare(value, exact, gradient.dtype)
