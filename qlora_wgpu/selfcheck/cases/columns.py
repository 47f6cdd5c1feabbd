"""Columns and rows of matrices, heads composed of them, and type conversions."""

from __future__ import annotations

from typing import Any

import numpy as np

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.columns import HeadPart, column_scale, columns, group_columns, head_parts
from qlora_wgpu.ops.tensor import (
    as_float32,
    cast,
    clamped,
    mean_of_rows,
    merged_rows,
    standardized,
)
from qlora_wgpu.reference import attention as formulas
from qlora_wgpu.reference import pointwise
from qlora_wgpu.selfcheck.cases.common import ROWS, Exact, compare_op, each, normal
from qlora_wgpu.selfcheck.runner import Array, Runner

_HEADS, _GROUP, _HEAD_DIM = 5, 27, 21


@each((True,), (False,))
def check_columns(run: Runner, rounded_first: bool) -> None:
    """Overlapping slices, and the sum of their gradients."""

    def op(g: Graph, x: Tensor) -> list[Tensor]:
        return [columns(g, x, 3, 14), columns(g, x, 9, 21)]

    def formula(x: Array) -> tuple[Array, ...]:
        return x[:, 3:17], x[:, 9:30]

    exact = not rounded_first, rounded_first
    compare_op(run, op, formula, [normal("x", ROWS, 45)], exact=exact, copies=True)


@each((True,), (False,))
def check_column_scale(run: Runner, exact_gradient: bool) -> None:
    """Columns times a factor of each, with gradients of both types."""
    x, factors = normal("x", ROWS, 45), normal("factors", 45)
    compare_op(run, column_scale, pointwise.column_scale, [x], factors, exact=exact_gradient)


@each((True,), (False,))
def check_group_columns(run: Runner, rounded_first: bool) -> None:
    """Three parts of each group and the rest, and the sum of their gradients; also in float32."""
    groups, group, widths = 7, 37, (11, 9, 6)
    parts = [(0, widths), (sum(widths), (8,))]
    x = normal("x", ROWS, groups * group)

    def op(g: Graph, x: Tensor) -> list[Tensor]:
        return [group_columns(g, x, groups, group, *p, float32=not rounded_first) for p in parts]

    def formula(x: Array) -> tuple[Array, ...]:
        return tuple(formulas.group_columns(x, groups, group, *part) for part in parts)

    exact = not rounded_first, rounded_first
    compare_op(run, op, formula, [x if rounded_first else Exact(x)], exact=exact, copies=True)


@each((True,), (False,))
def check_head_parts(run: Runner, rounded_first: bool) -> None:
    """Heads of two matrices, and of one padded with zeros; the sum of all gradients."""
    own, common = normal("own", ROWS, _HEADS * _GROUP), normal("common", ROWS, 43)

    def places(own: Any, common: Any) -> list[list[tuple[Any, int, int, int]]]:
        return [
            [(common, 0, 30, 9), (own, _GROUP, 4, 12)],
            [(own, _GROUP, 11, 16)],
            [(common, 0, 2, 8), (common, 0, 32, 8)],
        ]

    def op(g: Graph, own: Tensor, common: Tensor) -> list[Tensor]:
        heads = ([HeadPart(*part) for part in parts] for parts in places(own, common))
        return [head_parts(g, parts, _HEADS, _HEAD_DIM) for parts in heads]

    def formula(own: Array, common: Array) -> tuple[Array, ...]:
        return tuple(formulas.head_parts(p, _HEADS, _HEAD_DIM) for p in places(own, common))

    compare_op(run, op, formula, [own, common], exact=not rounded_first, copies=True)


def check_types(run: Runner) -> None:
    """Copies in another type, and sums of gradients of both types."""
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
    """Bit-exact rounding: ties in both directions, infinities and NaN."""
    high = np.arange(0x3F70, 0x3F90, dtype=np.uint32)[:, None] << 16
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    bits = np.concatenate([(high | low).ravel(), (high | low).ravel() | 0x80000000])
    special = [0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF]
    x = np.concatenate([bits, np.array(special, np.uint32)]).view(np.float32)[None]
    y = cast(run.graph, run.float32(x.astype(np.float64)))
    (got,) = run.run(as_float32(run.graph, y))
    run.compare_exactly(got, run.rounded(x.astype(np.float64)))


@each((2, 24), (9, 40))
def check_groups_of_rows(run: Runner, count: int, columns: int) -> None:
    """Neighbouring rows as one row, and their means; neither has a gradient."""

    def op(g: Graph, x: Tensor) -> list[Tensor]:
        return [merged_rows(g, x, count), mean_of_rows(g, x, count)]

    def formula(x: Array) -> tuple[Array, ...]:
        return x.reshape(-1, count * columns), x.reshape(-1, count, columns).mean(axis=1)

    compare_op(run, op, formula, [normal("x", ROWS * count, columns)], exact=None)


def check_clamped(run: Runner) -> None:
    """Between stored numbers that exclude zero, which padding is; it has no gradient."""
    x, bounds = 2 * normal("x", ROWS, 52), (np.array([[0.25]]), np.array([[1.5]]))

    def op(g: Graph, x: Tensor, lowest: Tensor, highest: Tensor) -> list[Tensor]:
        return [clamped(g, x, lowest, highest), clamped(g, as_float32(g, x), lowest, highest)]

    def formula(x: Array, lowest: Array, highest: Array) -> tuple[Array, ...]:
        return (pointwise.clamped(x, lowest.item(), highest.item()),) * 2

    compare_op(run, op, formula, [x], *bounds, exact=None)


def check_standardized(run: Runner) -> None:
    """By numbers of each column, float32; it has no gradient."""
    x, bias, scale = normal("x", ROWS, 52), normal("bias", 1, 52), normal("scale", 1, 52)
    compare_op(run, standardized, pointwise.standardized, [x], bias, scale, 3.0, exact=None)
