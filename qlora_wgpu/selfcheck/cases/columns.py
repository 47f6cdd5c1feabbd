"""Columns of groups, like parts together."""

from __future__ import annotations

import numpy as np

from qlora_wgpu.ops.columns import group_columns
from qlora_wgpu.reference import attention as attention_reference
from qlora_wgpu.reference.tape import grad
from qlora_wgpu.selfcheck.cases.common import ROWS, each, normal
from qlora_wgpu.selfcheck.runner import Runner


@each((True,), (False,))
def check_group_columns(run: Runner, rounded_first: bool) -> None:
    """Three parts of each group and what remains, and the sum of their gradients.

    Or of float32, to which nothing is lost.
    """
    groups, group, widths = 7, 37, (11, 9, 6)
    parts = [(0, widths), (sum(widths), (8,))]
    x = normal("x", ROWS, groups * group)
    tx = (run.operand if rounded_first else run.float32)(x, grad=True)
    ys = [
        group_columns(run.graph, tx, groups, group, *part, float32=not rounded_first)
        for part in parts
    ]
    dys = [normal(f"dy{i}", ROWS, y.columns) for i, y in enumerate(ys)]
    makers = (run.operand, run.float32) if rounded_first else (run.float32, run.operand)
    run.graph.add_gradient(ys[0], makers[0](dys[0]))
    (dx,) = run.gradients(ys[1], makers[1](dys[1]), tx)
    *got, got_dx = run.run(*ys, dx)
    rounded = 0 if rounded_first else 1
    x = run.rounded(x) if rounded_first else np.asarray(x, np.float32).astype(np.float64)
    dys[rounded] = run.rounded(dys[rounded])
    exact = np.zeros_like(x)
    for y, dy, part in zip(got, dys, parts, strict=True):
        exact += grad(attention_reference.group_columns, dy, x, groups, group, *part)
        run.compare_exactly(y, attention_reference.group_columns(x, groups, group, *part))
    run.compare(got_dx, exact)
