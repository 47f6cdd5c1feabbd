"""AltUp's streams: predicted, corrected, and brought to one magnitude."""

from __future__ import annotations

from typing import Any

import numpy as np

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.altup import altup_correct, altup_predict, rms_match, stacked, unstacked
from qlora_wgpu.reference import altup as formulas
from qlora_wgpu.selfcheck.cases.common import ROWS, Exact, compare_op, each, normal, uneven
from qlora_wgpu.selfcheck.runner import Array, Runner

_WIDE = 2100  # more than any subgroup holds, and than a row's threads read at once


def _streams(streams: int, columns: int) -> tuple[Exact, Exact]:
    others = normal("others", (streams - 1) * ROWS, columns)
    return Exact(normal("x", ROWS, columns)), Exact(others)


@each(
    (4, 0, 52, True, True),
    (3, 2, 13, True, True),
    (2, 1, _WIDE, False, True),
    (4, 0, 20, True, False),
)
def check_altup_predict(
    run: Runner, streams: int, active: int, columns: int, uses_own: bool, uses_others: bool
) -> None:  # fmt: skip
    """Both predictions and all gradients, also where only one prediction is read."""
    coefs = Exact(normal("coefs", ROWS, streams**2))
    exact = [True if used else None for used in (uses_own, uses_others)]
    inputs, op = [*_streams(streams, columns), coefs], altup_predict
    compare_op(run, op, formulas.altup_predict, inputs, active, exact=exact)


@each((4, 0, 52, True), (3, 2, 13, True), (4, 1, _WIDE, True), (2, 0, 20, False))
def check_altup_correct(run: Runner, streams: int, active: int, columns: int, adds: bool) -> None:
    """The other streams' and the active one's corrections, and all gradients."""
    predicted, others = _streams(streams, columns)
    gains = Exact(normal("gains", ROWS, streams))
    made, added = (Exact(normal(name, ROWS, columns)) for name in ("made", "added"))
    rest = [j for j in range(streams) if j != active]

    def op(
        g: Graph, base: Tensor, p: Tensor, h: Tensor, gains: Tensor, added: Tensor | None = None
    ) -> list[Tensor]:
        of_others = altup_correct(g, base, p, h, gains, active, added)
        return [of_others, altup_correct(g, p, p, h, gains, active)]

    def formula(base: Array, p: Array, h: Array, gains: Array, *added: Array) -> tuple[Any, Any]:
        own = formulas.altup_correct(p, p, h, gains, numbers=[active])
        return formulas.altup_correct(base, p, h, gains, *added, numbers=rest), own

    inputs = [others, predicted, made, gains, *([added] if adds else [])]
    compare_op(run, op, formula, inputs, exact=[True, True])


@each((52, True, True), (13, True, False), (_WIDE, False, True))
def check_rms_match(run: Runner, columns: int, adds: bool, exact_gradient: bool) -> None:
    """y and all gradients, with rows of very different magnitudes, and some below the floor."""
    x, like = uneven("x", ROWS, columns), 0.5 + normal("like", ROWS, columns)
    skip = [Exact(normal("skip", ROWS, columns))] * adds

    def op(g: Graph, x: Tensor, like: Tensor, *residual: Tensor) -> Tensor:
        return rms_match(g, x, like, 1e-5, *residual)

    def formula(x: Array, like: Array, *residual: Array) -> Any:
        return formulas.rms_match(x, like, 1e-5, *residual)

    inputs = [Exact(x), Exact(like), *skip]
    compare_op(run, op, formula, inputs, exact=exact_gradient, by_row=True)


@each((True, True), (False, False))
def check_stacked(run: Runner, exact_gradient: bool, uses_all: bool) -> None:
    """Streams one below the other and apart again, all of them read or not."""
    inputs = [normal(name, ROWS, 52) for name in "abc"]

    def op(g: Graph, *xs: Tensor) -> list[Tensor]:
        whole = stacked(g, xs)
        return [whole, *unstacked(g, whole, 3)]

    def formula(*xs: Array) -> tuple[Any, ...]:
        return np.concatenate(xs), *xs

    exact = exact_gradient, True, True if uses_all else None, not exact_gradient
    compare_op(run, op, formula, inputs, exact=exact)
