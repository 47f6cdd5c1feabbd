"""Mixtures of experts: their layers, the choice of experts, and few tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial

import numpy as np

from qlora_wgpu.config import LoraConfig
from qlora_wgpu.families.family import ExpertSpec
from qlora_wgpu.graph.tensor import Storage
from qlora_wgpu.kernels.common import EXPERT_TILE, NEW_TOKENS_TILE
from qlora_wgpu.kernels.dequantize import fits_words
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.model.quantized_weights import (
    codebook_tensor,
    device_arrays,
    lay_out,
    words,
)
from qlora_wgpu.ops.experts import expert_linear, with_factors
from qlora_wgpu.ops.modules import DenseExperts, ExpertLinear, ExpertMatrix
from qlora_wgpu.ops.optimizers import STATS_BALANCE, STATS_LENGTH
from qlora_wgpu.ops.routing import (
    Scoring,
    balance_loss,
    balance_sums,
    combine,
    largest,
    permute,
    route,
    route_by_scores,
)
from qlora_wgpu.quant import quantize_nf4
from qlora_wgpu.reference import experts as experts_reference
from qlora_wgpu.reference.tape import grad, grads
from qlora_wgpu.selfcheck.cases.common import (
    each,
    filled_adapter,
    joined,
    normal,
    whole_gradient,
)
from qlora_wgpu.selfcheck.cases.new_tokens import new_tokens, stored_weight
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


_ROWS, _EXPERTS_SCORES, _TOP_K_SCORES = 150, 12, 3
_INNER = 4e-6  # exp is good to 1e-6


def _logits_scores() -> Array:
    """Router's outputs, far enough apart for float32; some are equal, some are far from zero."""
    order = np.argsort(normal("order", _ROWS, _EXPERTS_SCORES), axis=1)
    logits = 0.4 * order + 0.03 * normal("logits", _ROWS, _EXPERTS_SCORES) - 2.0
    logits[1::5, 7] = logits[1::5, 3]
    logits[::7] *= 6.0
    exact: Array = logits.astype(np.float32).astype(np.float64)
    return exact


@each(
    (Scoring(True, True, least=1e-20, scale=1.7, pairs=True, groups=4, top_groups=2),),
    (Scoring(True, True, least=0.4),),
    (Scoring(True, False, scale=0.5),),
    (Scoring(False, True, least=0.35, at_least=True),),
    (Scoring(False, False, groups=3, top_groups=1, scale=2.0),),
)
def check_expert_scores(run: Runner, scoring: Scoring) -> None:
    """Slots, weights and the gradient of the logits; with corrections and without."""
    sigmoid, has_bias = scoring.sigmoid, scoring.normalized
    rule = experts_reference.Rule(**asdict(scoring))
    logits, dweights = _logits_scores(), normal("dweights", _ROWS, _TOP_K_SCORES)
    bias = (0.3 * normal("bias", _EXPERTS_SCORES)).astype(np.float32).astype(np.float64) * has_bias
    tlogits = run.float32(logits, grad=True)
    tbias = run.float32(bias) if has_bias else None
    routing = route_by_scores(run.graph, tlogits, tbias, _TOP_K_SCORES, scoring)
    given = (run.float32 if sigmoid else run.operand)(dweights)
    gradients = run.gradients(routing.weights, given, tlogits)
    got_slots, got_weights, got = run.run(routing.slots, routing.weights, *gradients)
    dweights = dweights if sigmoid else run.rounded(dweights)
    ids, weights = experts_reference.route_by_scores(logits, bias, _TOP_K_SCORES, rule)
    slots, _ = experts_reference.slots_of(ids, _EXPERTS_SCORES, EXPERT_TILE)
    run.compare_exactly(got_slots, slots.astype(np.float64))
    run.compare(got_weights, weights, inner=_INNER)
    exact = grad(experts_reference.weights_of, dweights, logits, ids, rule)
    run.compare(got, exact, inner=_INNER)


@each((True,), (False,))
def check_scaled_weights(run: Runner, normalized: bool) -> None:
    """The weights of the largest logits times a factor, and the gradient of the logits."""
    logits, dweights, scale = _logits_scores(), normal("dweights", _ROWS, _TOP_K_SCORES), 0.3
    tlogits = run.float32(logits, grad=True)
    routing = route(run.graph, tlogits, _TOP_K_SCORES, normalized=normalized, scale=scale)
    gradients = run.gradients(routing.weights, run.float32(dweights), tlogits)
    got_weights, got = run.run(routing.weights, *gradients)
    ids, weights = experts_reference.route(logits, _TOP_K_SCORES, normalized=normalized)
    run.compare(got_weights, scale * weights, inner=_INNER)
    exact = grad(
        experts_reference.softmax_weights, scale * dweights, logits, ids, normalized=normalized
    )
    run.compare(got, exact, inner=_INNER)


@each((True,), (False,))
def check_balance_of_experts(run: Runner, weighted: bool) -> None:
    """The loss of two layers' choices, some rows of padding, and the gradients of their logits."""
    g, coefficient, count = run.graph, 0.4, 9
    weights = np.abs(normal("weights", 1, _ROWS)).astype(np.float32) if weighted else None
    labels = float(count) if weights is None else float(weights[0, :count].sum())
    segments = np.repeat([[1, 30, 0]], [29, _ROWS - 36, 7], axis=1)
    targets = np.where(np.arange(_ROWS) < count, 1, IGNORE_INDEX)[None]
    batch, layers = (
        run.batch(segments, targets=targets, weights=weights),
        [_logits_scores(), _logits_scores()[::-1]],
    )
    given = [run.float32(logits, grad=True) for logits in layers]
    stats = run.float32(np.ones((1, STATS_LENGTH)))
    sums = balance_sums(g, given[0], largest(g, given[0], _TOP_K_SCORES), batch)
    sums = balance_sums(g, given[1], largest(g, given[1], _TOP_K_SCORES), batch, sums)
    balance_loss(g, sums, _TOP_K_SCORES, batch, stats, coefficient)
    g.backward()
    got_stats, *got = run.run(stats, *(g.gradient_of(logits) for logits in given))
    mask = (segments > 0).astype(np.float64).ravel()
    expected = np.ones((1, STATS_LENGTH))
    expected[0, STATS_BALANCE] += labels * experts_reference.balance_loss(
        layers, _TOP_K_SCORES, mask
    )
    run.compare(got_stats, expected, inner=_INNER)
    for ours, exact in zip(
        got, grad(experts_reference.balance_loss, 1.0, layers, _TOP_K_SCORES, mask), strict=True
    ):
        run.compare(ours, labels * coefficient * exact, inner=_INNER)


_EXPERTS_FEW, _TOP_K_FEW = 6, 3


def _experts(run: Runner, form: str, outer: int, inner: int) -> tuple[ExpertMatrix, Array]:
    """Experts of a form, or operands in two shards, and their weights as they are held."""
    if form == "dense":
        w = normal("w", _EXPERTS_FEW, outer, inner)
        pieces = tuple(
            (first, count, run.weight(w[first : first + count].reshape(-1, inner)))
            for first, count in ((0, 2), (2, 4))
        )
        return DenseExperts(_EXPERTS_FEW, outer, inner, pieces), run.rounded_weight(w)
    stored = [stored_weight(form, outer, inner, number) for number in range(_EXPERTS_FEW)]
    whole = Storage("experts", "check", 256)
    matrix, storages = lay_out(
        "w", (outer, inner), stored[0].format, _EXPERTS_FEW, whole.part, None
    )
    for leaf, storage in storages.items():
        each_one = [words(device_arrays(weight)[leaf]) for weight in stored]
        size = storage.nbytes // 4 // _EXPERTS_FEW
        storage.data = np.stack([np.pad(a, (0, size - a.size)) for a in each_one])
    return matrix, np.stack([weight.dequantize().astype(np.float64) for weight in stored])


@each(
    ("double", 64, 3, 8, True),
    ("NF4", 72, 9, 5, False),
    ("Q5_K", 256, 1, 0, True),
    ("dense", 36, 2, 3, True),
    ("dense", 40, 1, 0, False),
)
def check_experts_of_new_tokens(
    run: Runner, form: str, inner: int, rows: int, r: int, has_bias: bool
) -> None:
    """Some tokens meet three of six experts each; which there are of a form is in one range."""
    outer, g = 44, run.graph
    stack = ExpertSpec("mlp.experts", "up_proj", _EXPERTS_FEW, outer, inner)
    config = LoraConfig(r=max(r, 1), lora_alpha=2 * max(r, 1), target_modules=["up_proj"])
    adapter, parts = filled_adapter(config, [], [stack])
    names = sorted(parts)
    a, b = (np.stack([parts[n] for n in names if leaf in n]) for leaf in ("lora_A", "lora_B"))
    weight, held = _experts(run, form, outer, inner)
    x, logits = normal("x", rows, inner), normal("logits", rows, _EXPERTS_FEW)
    skip, bias = normal("skip", rows, outer), normal("bias", _EXPERTS_FEW, outer)
    logits = logits.astype(np.float32).astype(np.float64)
    routing = route(g, run.float32(logits), _TOP_K_FEW, normalized=True, tile=NEW_TOKENS_TILE)
    layer = ExpertLinear("up", weight, adapter.expert_loras[stack.name] if r else None)
    layer = replace(layer, bias=run.float32(bias) if has_bias else None)
    y = expert_linear(g, permute(g, run.operand(x), routing), layer, routing, new_tokens(rows))
    (got,) = run.run(combine(g, y, routing, run.float32(skip)))
    ids, weights = experts_reference.route(logits, _TOP_K_FEW, normalized=True)
    full = held + 2.0 * (r > 0) * (b @ a)
    exact = skip + experts_reference.mix(
        run.rounded(x), ids, weights, full, bias if has_bias else None
    )
    run.compare(got, exact, inner=ROUNDING[run.dtype])
