"""Updates of AdamW, with 8-bit moments, and of Lion; gradients in bfloat16 and in pieces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from qlora_wgpu.graph.sharded_vector import ShardedVector
from qlora_wgpu.graph.tensor import Storage, Tensor, matrix, stored_bits, stored_floats, vector
from qlora_wgpu.lora.moments import MOMENT_VALUES
from qlora_wgpu.ops.moments import BlockTable, Span, TensorMoments
from qlora_wgpu.ops.optimizers import (
    AdamWConfig,
    AdamWState,
    LionConfig,
    LionState,
    adamw,
    adamw_8bit,
    lion,
)
from qlora_wgpu.ops.tensor import add_to, fill_zero, summed
from qlora_wgpu.reference import optimizers as optimizers_reference
from qlora_wgpu.selfcheck.cases.common import each, normal
from qlora_wgpu.selfcheck.runner import Array, Runner


def _flat(values: Array, dtype: str = "float32") -> Tensor:
    data = stored_bits(values.astype(np.float32), dtype)
    return vector("flat", data.size, dtype, Storage("flat", "check", data.nbytes, data))


def _halves(values: Array) -> Array:
    """The numbers without what bfloat16 does not hold."""
    cut = values.astype(np.float32).view(np.uint32) & 0xFFFF0000
    return cut.view(np.float32).astype(np.float64)


@each(("float32", 1.0, 1.0), ("float32", 0.0, 1.0), ("bfloat16", 1.0, 1.0),
      ("float32", 1.0, np.nan), ("bfloat16", 1.0, np.inf))  # fmt: skip
def check_lion(run: Runner, dtype: str, max_norm: float, factor: float) -> None:
    """Two steps: clipped or not, from a gradient of either type, and refused for their norm."""
    length, split, tokens = 1216, 500, 17
    state = optimizers_reference.Lion(normal("p", length), 0.1 * normal("m", length))
    config = LionConfig(weight_decay=0.1, max_grad_norm=max_norm)
    for t in (1, 2):
        gradient = _halves(3 * normal(f"gradient {t}", length))
        gradient[:64] = 0.0  # no direction, where there is no moment
        state.m[:64] = 0.0
        gradient[1111] *= factor
        given = (state.p, state.m, np.array([1e-2, 7.0, 7.0, 3e-2]), np.array([9.0, 17.0, 7, 7]))
        (p, m, info, stats), g = map(_flat, given), _flat(gradient, dtype)
        lion(run.graph, LionState(p, g, m, info, stats, split), config)
        got_p, got_m, zeroed = (row[0] for row in run.run(p, m, g))
        run.graph.launches.clear()
        run.compare_exactly(zeroed, np.zeros(length))
        if not np.isfinite(factor):
            run.compare_exactly(got_p, state.p.astype(np.float32))
            run.compare_exactly(got_m, state.m.astype(np.float32))
            continue
        parts = [replace(state), replace(state)]
        for part, rate in zip(parts, (1e-2, 3e-2), strict=True):
            _, between = optimizers_reference.lion(
                part, gradient, tokens, lr=rate, beta1=0.9, beta2=0.99, weight_decay=0.1,
                max_norm=max_norm,
            )  # fmt: skip
        exact = np.where(np.arange(length) < split, parts[0].p, parts[1].p)
        # Float32 may take a number next to zero for zero, or for its negative.
        certain = (np.abs(between) > 1e-6) | (gradient == 0)
        run.compare(got_p[certain], exact[certain])
        run.compare(got_m, parts[0].m)
        moved = got_p - state.p.astype(np.float32)
        run.compare(moved[certain], (exact - state.p)[certain], inner=1e-4)
        state = optimizers_reference.Lion(got_p.astype(np.float64), got_m.astype(np.float64))


Words = npt.NDArray[np.uint32]


def check_optimizer_8bit(run: Runner) -> None:
    """Three steps of AdamW with 8-bit moments: tensors in codes, of odd rows, and in float32.

    A code may be its neighbour where float32 decides between the two, so that what codes stand for
    is compared, and the largest of each block.
    """
    spans = [Span(64, 37, 131, 136), Span(5120, 5, 83, 88)]
    blocks, length, rate = BlockTable(spans, MOMENT_VALUES), 5120 + 5 * 88, 1e-2
    kept = [np.zeros(blocks.words, np.uint32) for _ in range(2)]
    p = normal("p", length)
    config = AdamWConfig(weight_decay=0.1, max_grad_norm=0.0, adam_epsilon=1e-3)
    for t in (1, 2, 3):
        gradient = normal(f"gradient {t}", length)
        gradient[600:1200] = 0
        info = np.array([rate, 1 - 0.9**t, np.sqrt(1 - 0.999**t), 2 * rate])
        given = (p, gradient, info, np.array([9.0, 7.0, 0.0, 0.0]))
        tp, tg, step, stats = (_flat_codes(x.astype(np.float32)) for x in given)
        m, v = map(_flat_codes, kept)
        adamw_8bit(run.graph, AdamWState(tp, tg, m, v, step, stats, 5120), blocks, config)
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


def _moment(parts: Mapping[str, npt.NDArray[np.generic]], number: int) -> Array:
    state = parts[f"state{number}"]
    if (scales := parts.get(f"absmax{number}")) is None:
        return state.astype(np.float64)
    codes = optimizers_reference.Quantized(state.astype(np.uint8), scales.astype(np.float64))
    return codes.values(signed=number == 1)


def _flat_codes(data: npt.NDArray[np.float32] | Words) -> Tensor:
    return vector("flat", data.size, str(data.dtype), Storage("flat", "check", data.nbytes, data))


_SPANS = (Span(64, 37, 131, 136), Span(5120, 5, 83, 88))
_LENGTH = 5632


def check_rounded_sums(run: Runner) -> None:
    """A part of a vector, added up in float32 and rounded to nearest even, ties among them."""
    before, added = normal("before", _LENGTH), normal("added", 37, 131)
    before[64 : 64 + 136 * 4] = 1.0
    added[:2] = 2.0**-8  # half of the last place: to even
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
    """The very update that the same numbers make in float32."""
    gradient = np.zeros(_LENGTH)
    for span in _SPANS:
        rows = gradient[span.offset :][: span.rows * span.stride].reshape(span.rows, -1)
        rows[:, : span.columns] = normal("gradient", span.rows, span.columns)
    gradient = as_held(gradient, "bfloat16").astype(np.float64)
    results = []
    for dtype in ("float32", "bfloat16"):
        blocks = BlockTable(_SPANS, MOMENT_VALUES)
        p, g = _flat(normal("p", _LENGTH)), _flat(gradient, dtype)
        m, v = (_flat(np.zeros(_LENGTH)) for _ in range(2))
        if in_codes:
            m, v = (blocks.new_moment("moment").whole for _ in range(2))
            for each_moment in (m, v):
                assert each_moment.storage is not None
                each_moment.storage.data = np.zeros(blocks.words, np.uint32)
        info = _flat(np.array([1e-2, 0.1, np.sqrt(1e-3), 2e-2]))
        stats = _flat(np.array([9.0, 7.0, 0.0, 0.0]))
        state = AdamWState(p, g, m, v, info, stats, 5120)
        if in_codes:
            adamw_8bit(run.graph, state, blocks, AdamWConfig())
        else:
            adamw(run.graph, state, AdamWConfig())
        (zeroed,) = run.run_bits(g)
        run.compare_exactly(zeroed[0].astype(np.float64), np.zeros(_LENGTH))
        run.graph.launches.clear()
        results.append([row[0] for row in run.run_bits(p, m, v, stats)])
    for a, b in zip(*results, strict=True):
        run.compare_exactly(a.astype(np.float64), b.astype(np.float64))


def as_held(values: Array, dtype: str) -> np.ndarray:
    """What a type holds of numbers."""
    return stored_floats(stored_bits(values.astype(np.float32), dtype).tobytes(), dtype).copy()


_SPANS_PIECES = [Span(0, 37, 131, 136), Span(5056, 41, 101, 104), Span(9344, 5, 83, 88)]
_CUTS, _LENGTH_PIECES = [5056, 9344], 9344 + 5 * 88


@each((False,), (True,))
def check_update_in_pieces(run: Runner, in_codes: bool) -> None:
    """Two gradients are summed, and clipped: neither sums nor updates depend on the cuts."""
    results = [_updated(run, cuts, in_codes=in_codes) for cuts in ([], _CUTS)]
    for whole, cut in zip(*results, strict=True):
        run.compare_exactly(cut.astype(np.float64), whole.astype(np.float64))


def _updated(run: Runner, cuts: list[int], *, in_codes: bool) -> list[Array]:
    """The bits of the vectors, moments and sums after an update."""
    blocks = BlockTable(_SPANS_PIECES, MOMENT_VALUES, cuts)
    p, g, more, m, v = (_pieces(run, _values(name), cuts) for name in ("p", "g", "h", "m", "v"))
    info, stats = (
        _pieces(run, values, []).whole for values in ([1e-2, 0.1, 0.03, 2e-2], [9.0, 7.0, 0.0, 0.0])
    )
    if in_codes:
        m, v = blocks.new_moment("m"), blocks.new_moment("v")
        for piece in (*m.shards, *v.shards):
            assert piece.storage is not None
            piece.storage.data = np.zeros(piece.columns, np.uint32)
    add_to(run.graph, g, more)
    fill_zero(run.graph, more)
    state, config = AdamWState(p, g, m, v, info, stats, 6000), AdamWConfig(max_grad_norm=0.1)
    if in_codes:
        adamw_8bit(run.graph, state, blocks, config)
    else:
        adamw(run.graph, state, config)
    vectors = (p, g, more, m, v)
    bits = run.run_bits(*(piece for each in vectors for piece in each.shards), stats)
    run.graph.launches.clear()
    found, rows = [], iter(row[0] for row in bits)
    for each_vector in vectors:
        found.append(np.concatenate([next(rows) for _ in each_vector.shards]))
    return [*found, next(rows)]


def _values(name: str) -> Array:
    """Normal numbers in tensors of these spans, with zeros between them."""
    flat = np.zeros(_LENGTH_PIECES)
    for span in _SPANS_PIECES:
        rows = flat[span.offset :][: span.rows * span.stride].reshape(span.rows, -1)
        rows[:, : span.columns] = normal(name, span.rows, span.columns)
    return np.abs(flat) if name == "v" else flat


def _pieces(run: Runner, values: Array | list[float], cuts: list[int]) -> ShardedVector:
    flat = np.asarray(values, np.float32)
    ends = pairwise([0, *cuts, flat.size])
    pieces = ShardedVector.laid_out(
        "flat", "check", "float32", [end - begin for begin, end in ends]
    )
    for (begin, _), piece in zip(pairwise([0, *cuts, flat.size]), pieces.shards, strict=True):
        assert piece.storage is not None
        piece.storage.data = flat[begin : begin + piece.columns]
    return pieces
