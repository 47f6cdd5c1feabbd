"""Lion: an optimizer with one moment."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from qlora_wgpu.graph.tensor import Storage, Tensor, stored_bits, vector
from qlora_wgpu.ops.optimizers import LionConfig, LionState, lion
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
