"""The optimizer with moments in 8 bits."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from qlora_wgpu.graph.tensor import Storage, Tensor, vector
from qlora_wgpu.lora.moments import MOMENT_VALUES
from qlora_wgpu.ops.moments import BlockTable, Span, TensorMoments
from qlora_wgpu.ops.optimizers import AdamWConfig, AdamWState, adamw_8bit
from qlora_wgpu.reference import optimizers as optimizers_reference
from qlora_wgpu.selfcheck.cases.common import normal
from qlora_wgpu.selfcheck.runner import Array, Runner

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
        tp, tg, step, stats = (_flat(x.astype(np.float32)) for x in given)
        m, v = map(_flat, kept)
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


def _flat(data: npt.NDArray[np.float32] | Words) -> Tensor:
    return vector("flat", data.size, str(data.dtype), Storage("flat", "check", data.nbytes, data))
