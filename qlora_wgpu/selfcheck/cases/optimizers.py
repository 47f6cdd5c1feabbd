"""Updates of AdamW, also with 8-bit moments, and Lion; gradients in bfloat16 and in shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.graph.sharded_vector import ShardedVector
from qlora_wgpu.graph.tensor import Storage, Tensor, matrix, stored_bits, stored_floats, vector
from qlora_wgpu.lora.moments import MOMENT_VALUES
from qlora_wgpu.ops.moments import BlockTable, Span, TensorMoments
from qlora_wgpu.ops.optimizers import OptimizerConfig, OptimizerState, adamw, lion
from qlora_wgpu.ops.tensor import add_to, fill_zero, summed
from qlora_wgpu.reference import optimizers as optimizers_reference
from qlora_wgpu.selfcheck.cases.common import each, normal
from qlora_wgpu.selfcheck.runner import Array, Runner


def _flat(values: npt.NDArray[Any], dtype: str = "float32") -> Tensor:
    """A vector of numbers in a type, or of raw words."""
    data = values if values.dtype == np.uint32 else stored_bits(values.astype(np.float32), dtype)
    dtype = "uint32" if data is values else dtype
    return vector("flat", values.size, dtype, Storage("flat", "check", data.nbytes, data))


def _by_rates(
    step: Callable[..., Any], state: Any, gradient: Array, tokens: float, split: int
) -> tuple[Any, Any]:
    """The state after a step with different learning rates before and after the split."""
    parts = [replace(state), replace(state)]
    told = [
        step(part, gradient, int(tokens), lr=rate)
        for part, rate in zip(parts, (1e-2, 3e-2), strict=True)
    ]
    first = np.arange(len(state.p)) < split
    return replace(parts[0], p=np.where(first, parts[0].p, parts[1].p)), told[0]


@each((1.0, 17.0, 1.0), (0.0, 17.0, 1.0), (1e4, 17.0, 1.0), (1.0, 0.0, 1.0), (1.0, 17.0, np.nan),
      (1.0, 17.0, np.inf), (1.0, 17.0, -np.inf), (1.0, 17.0, 1e19))  # fmt: skip
def check_optimizer(run: Runner, max_norm: float, tokens: float, factor: float) -> None:
    """Two steps of AdamW: clipped or not, without labels, and skipped for their norm."""
    length, split = 1216, 500
    state = optimizers_reference.AdamW(
        normal("p", length), 0.1 * normal("m", length), 0.1 * normal("v", length) ** 2
    )
    config = OptimizerConfig(weight_decay=0.1, max_grad_norm=max_norm, adam_epsilon=1e-3)
    updates = tokens > 0 and factor == 1.0
    for t in (1, 2):
        gradient = 3 * normal(f"gradient {t}", length)
        gradient[1111 if factor != 1e19 else slice(None)] *= factor
        info = np.array([1e-2, 1 - 0.9**t, np.sqrt(1 - 0.999**t), 3e-2])
        given = (state.p, gradient, state.m, state.v, info, np.array([9.0, tokens, 7.0, 7.0]))
        tp, tg, tm, tv, step, stats = map(_flat, given)
        adamw(run.graph, OptimizerState(tp, tg, (tm, tv), step, stats, split), config)
        p, m, v, got_stats, got_gradient = (a[0] for a in run.run(tp, tm, tv, stats, tg))
        run.graph.launches.clear()
        run.compare_exactly(got_gradient, np.zeros(length))
        if not updates:
            for got, kept in ((p, state.p), (m, state.m), (v, state.v)):
                run.compare_exactly(got, kept.astype(np.float32))
            run.compare_exactly(got_stats[3], np.array(0.0))
            is_norm = np.isfinite(got_stats[2]) == (tokens == 0 or factor == 1e19)
            run.compare_exactly(got_stats[[0, 1]], np.array([9.0, tokens]))
            run.compare_exactly(np.array(float(is_norm or factor == 1e19)), np.array(1.0))
            continue
        how: Any = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-3, "weight_decay": 0.1}
        step_of = partial(optimizers_reference.adamw, t=t, max_norm=max_norm, **how)
        exact, norm = _by_rates(step_of, state, gradient, tokens, split)
        for got, value in ((p, exact.p), (m, exact.m), (v, exact.v)):
            run.compare(got, value)
        clipped = min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0
        run.compare_each(got_stats, (9.0, tokens, norm, clipped / tokens))
        run.compare(p - state.p.astype(np.float32), exact.p - state.p, inner=1e-4)
        state = replace(exact, p=p, m=m, v=v)


def _halves(values: Array) -> Array:
    """The numbers truncated to bfloat16."""
    cut = values.astype(np.float32).view(np.uint32) & 0xFFFF0000
    return cut.view(np.float32).astype(np.float64)


@each(("float32", 1.0, 1.0), ("float32", 0.0, 1.0), ("bfloat16", 1.0, 1.0),
      ("float32", 1.0, np.nan), ("bfloat16", 1.0, np.inf))  # fmt: skip
def check_lion(run: Runner, dtype: str, max_norm: float, factor: float) -> None:
    """Two steps: clipped or not, from gradients of both types, and skipped for their norm."""
    length, split, tokens = 1216, 500, 17
    state = optimizers_reference.Lion(normal("p", length), 0.1 * normal("m", length))
    config = OptimizerConfig(adam_beta2=0.99, weight_decay=0.1, max_grad_norm=max_norm)
    for t in (1, 2):
        gradient = _halves(3 * normal(f"gradient {t}", length))
        gradient[:64] = 0.0  # no direction without a moment
        state.m[:64] = 0.0
        gradient[1111] *= factor
        given = (state.p, state.m, np.array([1e-2, 7.0, 7.0, 3e-2]), np.array([9.0, 17.0, 7, 7]))
        (p, m, info, stats), g = map(_flat, given), _flat(gradient, dtype)
        lion(run.graph, OptimizerState(p, g, (m,), info, stats, split), config)
        got_p, got_m, zeroed = (row[0] for row in run.run(p, m, g))
        run.graph.launches.clear()
        run.compare_exactly(zeroed, np.zeros(length))
        if not np.isfinite(factor):
            run.compare_exactly(got_p, state.p.astype(np.float32))
            run.compare_exactly(got_m, state.m.astype(np.float32))
            continue
        how: Any = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "max_norm": max_norm}
        step_of = partial(optimizers_reference.lion, **how)
        exact, (_, between) = _by_rates(step_of, state, gradient, tokens, split)
        # In float32 a number next to zero may become zero or change its sign.
        certain = (np.abs(between) > 1e-6) | (gradient == 0)
        run.compare(got_p[certain], exact.p[certain])
        run.compare(got_m, exact.m)
        moved = got_p - state.p.astype(np.float32)
        run.compare(moved[certain], (exact.p - state.p)[certain], inner=1e-4)
        state = optimizers_reference.Lion(got_p.astype(np.float64), got_m.astype(np.float64))


Words = npt.NDArray[np.uint32]
_SPANS = (Span(64, 37, 131, 136), Span(5120, 5, 83, 88))
_LENGTH = 5632


def check_optimizer_8bit(run: Runner) -> None:
    """Three steps of AdamW with 8-bit moments: tensors in codes, with odd rows, and in float32.

    A code may be a neighbour of the exact one, since float32 decides between them, so the values of
    codes and the largest of each block are compared.
    """
    blocks, length, rate = BlockTable(_SPANS, MOMENT_VALUES), 5120 + 5 * 88, 1e-2
    kept = [np.zeros(blocks.words, np.uint32) for _ in range(2)]
    p = normal("p", length)
    config = OptimizerConfig(weight_decay=0.1, max_grad_norm=0.0, adam_epsilon=1e-3)
    for t in (1, 2, 3):
        gradient = normal(f"gradient {t}", length)
        gradient[600:1200] = 0
        info = np.array([rate, 1 - 0.9**t, np.sqrt(1 - 0.999**t), 2 * rate])
        given = (p, gradient, info, np.array([9.0, 7.0, 0.0, 0.0]))
        tp, tg, step, stats = map(_flat, given)
        m, v = map(_flat, kept)
        adamw(run.graph, OptimizerState(tp, tg, (m, v), step, stats, 5120), config, blocks)
        bits = [row[0] for row in run.run_bits(tp, m, v)]
        run.graph.launches.clear()
        got = bits[0].view(np.float32)
        for index, (tensor, lr) in enumerate(zip(blocks.tensors, (rate, 2 * rate), strict=True)):
            _compare_8bit(run, tensor, kept, bits[1:], (p, got, gradient), (t, lr, index == 0))
        p, kept = got.astype(np.float64), bits[1:]


def _compare_8bit(
    run: Runner,
    tensor: TensorMoments,
    before: list[Words],
    after: list[Words],
    flat: tuple[Array, Array, Array],
    how: tuple[int, float, bool],
) -> None:
    """One tensor's step; ``flat`` is the parameters before and after it, and the gradient."""
    span, (t, lr, in_codes) = tensor.span, how
    p, got, gradient = (
        x[span.offset : span.offset + span.rows * span.stride]
        .reshape(span.rows, -1)[:, : span.columns]
        .reshape(-1)
        for x in flat
    )
    old, new = (
        [_moment(tensor.split(words, number), number) for number, words in enumerate(both, 1)]
        for both in (before, after)
    )
    exact = optimizers_reference.AdamW(p, *old)
    optimizers_reference.adamw(
        exact, gradient, 7, t, lr=lr, beta1=0.9, beta2=0.999, epsilon=1e-3, weight_decay=0.1,
        max_norm=0.0,
    )  # fmt: skip
    run.compare(got, exact.p)
    run.compare(got - p.astype(np.float32), exact.p - p, inner=1e-4)
    for value, x, signed in ((new[0], exact.m, True), (new[1], exact.v, False)):
        nearest = (
            optimizers_reference.Quantized.of(x, signed=signed).values(signed=signed)
            if in_codes
            else x
        )
        run.compare(value, nearest, inner=1e-6 * np.abs(nearest) + 2.0 * np.abs(nearest - x))


def _moment(parts: Mapping[str, npt.NDArray[np.generic]], number: int) -> Any:
    state = parts[f"state{number}"]
    if (scales := parts.get(f"absmax{number}")) is None:
        return state.astype(np.float64)
    codes = optimizers_reference.Quantized(state.astype(np.uint8), scales.astype(np.float64))
    return codes.values(signed=number == 1)


def check_rounded_sums(run: Runner) -> None:
    """A part of a vector, summed in float32 and rounded to nearest even, including ties."""
    before, added = normal("before", _LENGTH), normal("added", 37, 131)
    before[64 : 64 + 136 * 4] = 1.0
    added[:2] = 2.0**-8  # half a unit in the last place: to even
    added[2:4] = 3.0 * 2.0**-8
    total = _flat(before, "bfloat16")
    expected = as_held(before, "bfloat16")
    part = matrix("part", 37, 131, "bfloat16", total.storage, 2 * 64)
    with summed(run.graph, part) as sums:
        x = run.float32(added)
        units = x.rows * x.units(8)
        tensors = {"y": sums, "a": None, "b": x}
        run.graph.launch("tensor/add.wgsl", units, tensors, {"units": units}, {"ACCUMULATE": True})
    rows = expected[64 : 64 + 37 * 136].reshape(37, 136)
    rows[:, :131] += added.astype(np.float32)
    (got,) = run.run(total)
    run.compare_exactly(got[0], as_held(expected, "bfloat16"))


@each((False,), (True,))
def check_update_from_halves(run: Runner, in_codes: bool) -> None:
    """The update is bit-identical to that of the same numbers in float32."""
    gradient = as_held(_values("gradient", _SPANS, _LENGTH), "bfloat16").astype(np.float64)
    zeros, results = np.zeros(_LENGTH), []
    for dtype in ("float32", "bfloat16"):
        p, m, v = (_shards(x, []) for x in (normal("p", _LENGTH), zeros, zeros))
        g, blocks = ShardedVector((_flat(gradient, dtype),)), BlockTable(_SPANS, MOMENT_VALUES)
        *made, zeroed = _updated(run, (p, m, v), g, 5120, 1.0, blocks if in_codes else None)
        run.compare_exactly(zeroed.astype(np.float64), np.zeros(_LENGTH))
        results.append(made)
    _compare_bits(run, *results)


def _updated(
    run: Runner,
    vectors: tuple[ShardedVector, ...],
    g: ShardedVector,
    split: int,
    max_norm: float,
    blocks: BlockTable | None,
) -> list[Array]:
    """The bits of parameters and moments, the sums, and the gradient after an update of AdamW."""
    p, *moments = vectors
    if blocks is not None:
        moments = [blocks.new_moment(name) for name in "mv"]
        for shard in (shard for moment in moments for shard in moment.shards):
            assert shard.storage is not None
            shard.storage.data = np.zeros(shard.columns, np.uint32)
    info, stats = _flat(np.array([1e-2, 0.1, 0.03, 2e-2])), _flat(np.array([9.0, 7.0, 0.0, 0.0]))
    state = OptimizerState(p, g, moments, info, stats, split)
    adamw(run.graph, state, OptimizerConfig(max_grad_norm=max_norm), blocks)
    given = (p, *moments, ShardedVector((stats,)), g)
    rows = iter(run.run_bits(*(shard for each_vector in given for shard in each_vector.shards)))
    run.graph.launches.clear()
    return [np.concatenate([next(rows)[0] for _ in own.shards]) for own in given]


def _compare_bits(run: Runner, one: list[Array], other: list[Array]) -> None:
    for a, b in zip(one, other, strict=True):
        run.compare_exactly(a.astype(np.float64), b.astype(np.float64))


def as_held(values: Array, dtype: str) -> np.ndarray:
    """The numbers rounded to a type."""
    return stored_floats(stored_bits(values.astype(np.float32), dtype).tobytes(), dtype).copy()


_SPANS_CUT = [Span(0, 37, 131, 136), Span(5056, 41, 101, 104), Span(9344, 5, 83, 88)]
_CUTS, _LENGTH_CUT = [5056, 9344], 9344 + 5 * 88


@each((False,), (True,))
def check_update_in_shards(run: Runner, in_codes: bool) -> None:
    """Two gradients are summed and clipped: neither sums nor updates depend on the shards."""
    results = []
    for cuts in ([], _CUTS):
        spans, length = _SPANS_CUT, _LENGTH_CUT
        p, g, more, m, v = (_shards(_values(name, spans, length), cuts) for name in "pghmv")
        add_to(run.graph, g, more)
        fill_zero(run.graph, more)
        blocks = BlockTable(spans, MOMENT_VALUES, cuts) if in_codes else None
        results.append(_updated(run, (p, m, v), g, 6000, 0.1, blocks))
    _compare_bits(run, *results)


def _values(name: str, spans: Sequence[Span], length: int) -> Array:
    """Normal numbers in tensors at these spans, with zeros between them."""
    flat = np.zeros(length)
    for span in spans:
        rows = flat[span.offset :][: span.rows * span.stride].reshape(span.rows, -1)
        rows[:, : span.columns] = normal(name, span.rows, span.columns)
    return np.abs(flat) if name == "v" else flat


def _shards(values: Array, cuts: Sequence[int]) -> ShardedVector:
    return ShardedVector(tuple(map(_flat, np.split(values, cuts))))
