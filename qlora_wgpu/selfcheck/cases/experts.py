"""Mixtures of experts: layers, routing, and few tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from qlora_wgpu.config import LoraConfig
from qlora_wgpu.families.family import ExpertSpec
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Storage, Tensor
from qlora_wgpu.kernels.common import EXPERT_TILE, NEW_TOKENS_TILE
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.experts import expert_linear, with_factors
from qlora_wgpu.ops.modules import DenseExperts, ExpertLinear, ExpertMatrix
from qlora_wgpu.ops.optimizers import STATS_BALANCE, STATS_LENGTH
from qlora_wgpu.ops.pointwise import scaled_sum
from qlora_wgpu.ops.routing import (
    Routing,
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
from qlora_wgpu.reference import experts as formulas
from qlora_wgpu.reference.tape import grad
from qlora_wgpu.selfcheck.cases.common import (
    Adapter,
    Exact,
    compare_op,
    each,
    filled_adapter,
    normal,
)
from qlora_wgpu.selfcheck.cases.formats import experts_of, stored_weight
from qlora_wgpu.selfcheck.cases.new_tokens import new_tokens
from qlora_wgpu.selfcheck.runner import ROUNDING, Array, Runner

_MANY, _EXPERTS, _TOP_K, _TOP_K_FEW = 150, 6, 2, 3
_NAMES = ("gate_proj", "up_proj")


def _logits(rows: int) -> Array:
    """Router logits for one row, or with which experts have whole tiles, one row more, or none.

    Some of the selected are equal, and some are equal to the best not selected. In some rows all
    are below the zeros of the padding.
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


@dataclass(frozen=True)
class Experts:
    """Layers of all experts, whose outputs are summed, with the inputs of their formula."""

    layers: list[ExpertLinear]
    held: list[Array]  # (experts, out, in) of each
    biases: list[Array | None]
    adapter: Adapter | None

    @classmethod
    def of(
        cls,
        run: Runner,
        weights: Mapping[str, tuple[ExpertMatrix, Array]],
        r: int,
        scaling: int,
        *,
        has_bias: bool = False,
    ) -> Experts:
        """Layers by name; without adapters if r is 0."""
        stacks = [
            ExpertSpec("mlp.experts", name, w.experts, w.rows, w.columns)
            for name, (w, _) in weights.items()
        ]
        config = LoraConfig(
            r=max(r, 1), lora_alpha=scaling * max(r, 1), target_modules=list(weights)
        )
        adapter = filled_adapter(config, [], stacks) if r else None
        layers, biases = [], list[Array | None]()
        for stack, (weight, held) in zip(stacks, weights.values(), strict=True):
            bias = normal(f"bias of {stack.leaf}", *held.shape[:2]) if has_bias else None
            lora = adapter[0].expert_loras[stack.name] if adapter else None
            given = None if bias is None else run.float32(bias)
            layers.append(ExpertLinear(stack.leaf, weight, lora, given))
            biases.append(bias)
        return cls(layers, [held for _, held in weights.values()], biases, adapter)

    def op(
        self, g: Graph, x: Tensor, routing: Routing, batch: BatchBuffers, residual: Tensor
    ) -> Tensor:
        permuted = permute(g, x, routing)
        for layer in self.layers:
            made = expert_linear(g, permuted, layer, routing, batch)
            residual = combine(g, made, routing, residual)
        return residual

    def formula(
        self, x: Array, ids: Any, weights: Array, residual: Array, parts: Mapping[str, Array]
    ) -> Array:
        """The same in float64, given the parts of their adapter."""
        for layer, w, bias in zip(self.layers, self.held, self.biases, strict=True):
            if self.adapter and layer.lora:
                own = sorted(n for n in parts if layer.name in n)
                a, b = (
                    np.stack([parts[n] for n in own if leaf in n]) for leaf in ("lora_A", "lora_B")
                )
                w = w + layer.lora.scaling * (b @ a)
            residual = residual + formulas.mix(x, ids, weights, w, bias)
        return residual


def dense_experts(
    run: Runner, w: Array, cuts: Sequence[int] = (0, 2)
) -> tuple[ExpertMatrix, Array]:
    """Experts in shards that start at ``cuts``, and their weights as stored."""
    experts, outer, inner = w.shape
    shards = tuple(
        (first, end - first, run.weight(w[first:end].reshape(-1, inner)))
        for first, end in pairwise((*cuts, experts))
    )
    return DenseExperts(experts, outer, inner, shards), run.rounded_weight(w)


def _held(run: Runner, w: Array, storage: str) -> tuple[ExpertMatrix, Array]:
    """Experts as operands, or in 4 bits, two at a time; and their weights as stored."""
    if storage == "dense":
        return dense_experts(run, w)
    stored = [quantize_nf4(part.astype(np.float32), 64, storage == "double") for part in w]
    run.graph.max_binding = 2 * run.weight(np.zeros(w.shape[1:])).nbytes
    held = np.stack([part.dequantize() for part in stored]).astype(np.float64)
    return experts_of(run, stored), run.rounded_weight(held)


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
    """Two layers of all experts, summed: y, dx, and the gradients of router and adapter.

    Errors in slots beyond an expert's own may only show in one kind of memory.
    """
    weights = {n: _held(run, normal(f"w of {n}", _EXPERTS, outer, inner), storage) for n in _NAMES}
    experts = Experts.of(run, weights, 11 * has_adapter, 1, has_bias=has_bias)
    inputs = normal("x", rows, inner), _logits(rows), normal("skip", rows, outer)
    compare_experts(run, experts, inputs, _TOP_K, normalized)


def check_experts_added_to_their_input(run: Runner) -> None:
    """Experts without a norm before them: their gradient is added to that of the residual."""
    weights = {"up_proj": _held(run, normal("w", _EXPERTS, 36, 36), "dense")}
    experts = Experts.of(run, weights, 0, 1)
    batch = run.batch(np.ones((1, _MANY), np.int64))

    def op(g: Graph, x: Tensor, logits: Tensor) -> Tensor:
        routing = route(g, logits, _TOP_K, normalized=True)
        made = expert_linear(g, permute(g, x, routing), experts.layers[0], routing, batch)
        return scaled_sum(g, x, combine(g, made, routing), 0.5)

    def formula(x: Array, logits: Array) -> Array:
        ids, chosen = formulas.route(logits, _TOP_K, normalized=True)
        both: Array = 0.5 * experts.formula(x, ids, chosen, x, {})
        return both

    x, logits = normal("x", _MANY, 36), Exact(_logits(_MANY))
    compare_op(run, op, formula, [x, logits], exact=(True,), inner=ROUNDING[run.dtype])


def compare_experts(
    run: Runner,
    experts: Experts,
    inputs: tuple[Array, ...],
    top_k: int,
    normalized: bool,
    batch: BatchBuffers | None = None,
) -> None:
    """Compares a mixture by its input, the router's logits and the residual."""
    x, logits, skip = inputs
    batch = batch or run.batch(np.ones((1, len(x)), np.int64))
    tile = NEW_TOKENS_TILE if batch.decodes else EXPERT_TILE

    def op(g: Graph, x: Tensor, logits: Tensor, skip: Tensor) -> list[Tensor]:
        routing = route(g, logits, top_k, normalized=normalized, tile=tile)
        y = experts.op(g, x, routing, batch, skip)
        return [y, routing.slots, routing.tiles.rows]

    def formula(x: Array, logits: Array, skip: Array, parts: Any = None) -> tuple[Array, ...]:
        ids, chosen = formulas.route(logits, top_k, normalized=normalized)
        slots, ends = formulas.slots_of(ids, logits.shape[1], tile)
        y = experts.formula(x, ids, chosen, skip, parts or {})
        return y, slots.astype(np.float64), ends.ravel().astype(np.float64)

    # The experts' outputs and their gradients are operands.
    compare_op(
        run, op, formula, [x, Exact(logits), Exact(skip)], adapter=experts.adapter,
        exact=None if batch.decodes else (True, None, None), inner=ROUNDING[run.dtype],
    )  # fmt: skip


@each((True,), (False,))
def check_factors(run: Runner, exact_gradient: bool) -> None:
    """Weights times factors of experts, with gradients of both types."""

    def op(g: Graph, logits: Tensor, factors: Tensor) -> Tensor:
        return with_factors(g, route(g, logits, _TOP_K, normalized=True), factors).weights

    def formula(logits: Array, factors: Array) -> Any:
        ids, weights = formulas.route(logits, _TOP_K, normalized=True)
        return formulas.with_factors(weights, ids, factors)

    inputs, factors = [Exact(_logits(_MANY))], normal("factors", _EXPERTS)
    compare_op(run, op, formula, inputs, factors, exact=exact_gradient)


_ROWS, _EXPERTS_SCORES, _TOP_K_SCORES = 150, 12, 3
_INNER = 4e-6  # exp is accurate to 1e-6


def _logits_scores() -> Array:
    """Router logits, distinct in float32; some are equal, some are far from zero."""
    order = np.argsort(normal("order", _ROWS, _EXPERTS_SCORES), axis=1)
    logits = 0.4 * order + 0.03 * normal("logits", _ROWS, _EXPERTS_SCORES) - 2.0
    logits[1::5, 7] = logits[1::5, 3]
    logits[::7] *= 6.0
    logits[3] = 0.25  # all equal: the first ones are selected
    exact: Array = logits.astype(np.float32).astype(np.float64)
    return exact


@each(
    (Scoring(True, True, least=1e-20, scale=1.7, pairs=True, groups=4, top_groups=2),),
    (Scoring(True, True, least=0.4),),
    (Scoring(True, False, scale=0.5),),
    (Scoring(False, True, least=0.7, at_least=True),),
    (Scoring(False, False, groups=3, top_groups=1, scale=2.0),),
)
def check_expert_scores(run: Runner, scoring: Scoring) -> None:
    """Slots, weights and the gradient of the logits, with and without corrections."""
    corrections = (0.3 * normal("bias", _EXPERTS_SCORES)).astype(np.float32).astype(np.float64)
    bias = [corrections] * scoring.normalized

    def op(g: Graph, logits: Tensor, bias: Tensor | None = None) -> list[Tensor]:
        routing = route_by_scores(g, logits, bias, _TOP_K_SCORES, scoring)
        return [routing.weights, routing.slots]

    def formula(logits: Array, bias: Any = 0.0) -> tuple[Array, ...]:
        rule = asdict(scoring)
        ids, weights = formulas.route_by_scores(logits, bias, _TOP_K_SCORES, **rule)
        slots, _ = formulas.slots_of(ids, _EXPERTS_SCORES, EXPERT_TILE)
        return weights, slots.astype(np.float64)

    inputs, exact = [Exact(_logits_scores())], (scoring.sigmoid, None)
    compare_op(run, op, formula, inputs, *bias, exact=exact, inner=_INNER)


@each((True,), (False,))
def check_scaled_weights(run: Runner, normalized: bool) -> None:
    """The weights of the largest logits times a factor, and the gradient of the logits."""

    def op(g: Graph, logits: Tensor) -> Tensor:
        return route(g, logits, _TOP_K_SCORES, normalized=normalized, scale=0.3).weights

    def formula(logits: Array) -> Any:
        return 0.3 * formulas.route(logits, _TOP_K_SCORES, normalized=normalized)[1]

    compare_op(run, op, formula, [Exact(_logits_scores())], exact=True, inner=_INNER)


@each((True,), (False,))
def check_balance_of_experts(run: Runner, weighted: bool) -> None:
    """The loss of two layers' routing, with padding, and the gradients of their logits."""
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
    expected[0, STATS_BALANCE] += labels * formulas.balance_loss(layers, _TOP_K_SCORES, mask)
    run.compare(got_stats, expected, inner=_INNER)
    for ours, exact in zip(
        got, grad(formulas.balance_loss, 1.0, layers, _TOP_K_SCORES, mask), strict=True
    ):
        run.compare(ours, labels * coefficient * exact, inner=_INNER)


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
    """A few tokens with three of six experts each; those of one format are in one range."""
    outer = 44
    if form == "dense":
        weight = dense_experts(run, normal("w", _EXPERTS, outer, inner))
    else:
        stored = [stored_weight(form, outer, inner, number) for number in range(_EXPERTS)]
        held = np.stack([own.dequantize().astype(np.float64) for own in stored])
        weight = experts_of(run, stored, Storage("experts", "check", 256)), held
    experts = Experts.of(run, {"up_proj": weight}, r, 2, has_bias=has_bias)

    inputs = normal("x", rows, inner), normal("logits", rows, _EXPERTS), normal("skip", rows, outer)
    compare_experts(run, experts, inputs, _TOP_K_FEW, True, new_tokens(rows))
