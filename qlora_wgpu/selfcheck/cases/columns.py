"""Columns of matrices, heads that are put together of them, and their types."""

from __future__ import annotations

import numpy as np

from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.columns import HeadPart, columns, group_columns, head_parts
from qlora_wgpu.ops.tensor import as_float32, cast
from qlora_wgpu.reference import attention as formulas
from qlora_wgpu.reference.tape import grad, grads
from qlora_wgpu.selfcheck.cases.common import (
    ROWS,
    each,
    normal,
    of_types,
)
from qlora_wgpu.selfcheck.runner import Array, Runner

_HEADS, _GROUP, _HEAD_DIM = 5, 27, 21


@each((True,), (False,))
def check_columns(run: Runner, rounded_first: bool) -> None:
    """Slices that overlap, and the sum of their gradients."""
    x, dys = normal("x", ROWS, 45), [normal("dy", ROWS, 14), normal("dz", ROWS, 21)]
    tx = run.operand(x, grad=True)
    slices = [columns(run.graph, tx, 3, 14), columns(run.graph, tx, 9, 21)]
    first, second = of_types(run, rounded_first)
    run.graph.add_gradient(slices[0], first(dys[0]))
    (dx,) = run.gradients(slices[1], second(dys[1]), tx)
    *got, got_dx = run.run(*slices, dx)
    rounded = 0 if rounded_first else 1
    dys[rounded] = run.rounded(dys[rounded])
    exact = np.zeros_like(x)
    exact[:, 3:17] += dys[0]
    exact[:, 9:30] += dys[1]
    run.compare_exactly(got[0], run.rounded(x)[:, 3:17])
    run.compare_exactly(got[1], run.rounded(x)[:, 9:30])
    run.compare(got_dx, exact)


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
        exact += grad(formulas.group_columns, dy, x, groups, group, *part)
        run.compare_exactly(y, formulas.group_columns(x, groups, group, *part))
    run.compare(got_dx, exact)


@each((True,), (False,))
def check_head_parts(run: Runner, rounded_first: bool) -> None:
    """Heads of two matrices, and of one with zeros behind; gradients of all uses added up."""
    own, common = normal("own", ROWS, _HEADS * _GROUP), normal("common", ROWS, 43)
    town, tshared = run.operand(own, grad=True), run.operand(common, grad=True)
    places: list[tuple[tuple[Tensor, int, int, int], ...]]
    places = [((tshared, 0, 30, 9), (town, _GROUP, 4, 12)), ((town, _GROUP, 11, 16),)]
    places.append(((tshared, 0, 2, 8), (tshared, 0, 32, 8)))
    ys = [
        head_parts(run.graph, [HeadPart(*part) for part in parts], _HEADS, _HEAD_DIM)
        for parts in places
    ]
    dys = [normal(f"dy{i}", ROWS, y.columns) for i, y in enumerate(ys)]
    make = run.operand if rounded_first else run.float32
    run.graph.add_gradient(ys[0], make(dys[0]))
    run.graph.add_gradient(ys[1], make(dys[1]))
    gradients = run.gradients(ys[2], make(dys[2]), town, tshared)
    *got, got_own, got_common = run.run(*ys, *gradients)
    if rounded_first:
        dys = [run.rounded(dy) for dy in dys]

    def made(own: Array, common: Array) -> tuple[Array, ...]:
        held = {town: own, tshared: common}
        plain = [[(held[x], *place) for x, *place in parts] for parts in places]
        return tuple(formulas.head_parts(p, _HEADS, _HEAD_DIM) for p in plain)  # type: ignore[arg-type]

    own, common = run.rounded(own), run.rounded(common)
    for y, exact in zip(got, made(own, common), strict=True):
        run.compare_exactly(y, exact)
    exact_own, exact_common = grads(made, dys, own, common, of=2)
    run.compare(got_own, exact_own)
    run.compare(got_common, exact_common)


def check_types(run: Runner) -> None:
    """Copies in another type, and gradients of both types added up."""
    x, dys = normal("x", ROWS, 45), [normal(name, ROWS, 45) for name in ("dy", "dz", "dw", "dv")]
    tx = run.float32(x, grad=True)
    y = cast(run.graph, tx)
    z = as_float32(run.graph, y)
    copies = [z, *(cast(run.graph, tx) for _ in dys[1:])]
    for index, (tensor, dy) in enumerate(zip(copies, dys, strict=True)):
        run.graph.add_gradient(tensor, (run.float32, run.operand)[index % 2](dy))
    run.graph.backward()
    got_dx, *got_z = run.run(run.graph.gradient_of(tx), *([z] if z is not tx else []))
    for got in got_z:
        run.compare_exactly(got, run.rounded(x))
    exact = [(run.rounded(dy) if index % 2 else dy) for index, dy in enumerate(dys)]
    run.compare(got_dx, np.sum(exact, axis=0))


def check_rounding(run: Runner) -> None:
    """Every bit of what is rounded: ties to both sides, infinities and NaN."""
    high = np.arange(0x3F70, 0x3F90, dtype=np.uint32)[:, None] << 16
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    bits = np.concatenate([(high | low).ravel(), (high | low).ravel() | 0x80000000])
    special = [0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF]
    x = np.concatenate([bits, np.array(special, np.uint32)]).view(np.float32)[None]
    y = cast(run.graph, run.float32(x.astype(np.float64)))
    (got,) = run.run(as_float32(run.graph, y))
    run.compare_exactly(got, run.rounded(x.astype(np.float64)))
