"""Mamba 2: time steps, the scan and the norm after it."""

from __future__ import annotations

from typing import Any

import numpy as np

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.mamba import gated_group_norm, mamba_scan, mamba_steps
from qlora_wgpu.reference import mamba as formulas
from qlora_wgpu.selfcheck.cases.common import ROWS, Exact, compare_op, each, normal
from qlora_wgpu.selfcheck.runner import Array, Runner


@each((True, 0.0, None), (False, 0.4, 2.0))
def check_mamba_steps(run: Runner, exact: bool, low: float, high: float | None) -> None:
    """Time steps and their gradient, of float32 and of operands, within limits."""
    raw = 3 * normal("raw", ROWS, 11)
    raw.flat[:5] = -60.0, 60.0, 0.0, -12.0, 12.0
    limits = low, high
    given = Exact(raw) if exact else raw
    bias = normal("bias", 11)
    compare_op(run, mamba_steps, formulas.mamba_steps, [given], bias, limits, exact=True)


@each((True, 1), (False, 3))
def check_mamba_scan(run: Runner, exact_gradient: bool, groups: int) -> None:
    """y and its gradients, over three chunks, two samples, and padding after them.

    The middle chunk starts with a state and passes its gradient on; every other head decays so
    slowly that chunks influence each other. States have more rows than a workgroup of gradients.
    """
    rows, heads, state_size = 135, 6, 72
    x, bc = normal("x", rows, heads * 40), normal("bc", rows, 2 * groups * state_size)
    dt = np.exp(normal("dt", rows, heads) - 1)
    a_log, d = normal("a_log", heads), normal("d", heads)
    a_log[::2] -= 4
    segments = np.repeat([[1, 20, 0]], [19, rows - 24, 5], axis=1)
    batch = run.batch(segments)

    def op(g: Graph, x: Tensor, bc: Tensor, dt: Tensor, a_log: Tensor, d: Tensor) -> Tensor:
        return mamba_scan(g, x, bc, dt, a_log, d, batch, heads, state_size)

    def formula(*given: Any) -> Any:
        return formulas.mamba_scan(*(*given, segments, state_size))

    compare_op(run, op, formula, [x, bc, Exact(dt)], a_log, d, exact=exact_gradient)


@each((1, True, 200), (3, True, 24), (2, False, 16))
def check_gated_group_norm(run: Runner, groups: int, gate_first: bool, size: int) -> None:
    """The norm of groups of columns, with the gate before it or after it."""
    x, z = normal("x", ROWS, groups * size), normal("z", ROWS, groups * size)
    x[::3] *= 2e-3  # so small that eps matters
    how: dict[str, Any] = {"eps": 1e-5, "groups": groups, "gate_first": gate_first}

    def op(g: Graph, x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
        return gated_group_norm(g, x, z, weight, **how)

    def formula(x: Array, z: Array, weight: Array) -> Any:
        return formulas.gated_group_norm(x, z, weight, **how)

    weight = normal("weight", groups * size)
    compare_op(run, op, formula, [x, z], weight, exact=gate_first, by_row=True)
