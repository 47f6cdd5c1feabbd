"""Heads that are put together from columns of other matrices."""

from __future__ import annotations

from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.columns import HeadPart, head_parts
from qlora_wgpu.reference import attention as attention_reference
from qlora_wgpu.reference.tape import grads
from qlora_wgpu.selfcheck.cases.common import ROWS, each, normal
from qlora_wgpu.selfcheck.runner import Array, Runner

_HEADS, _GROUP, _HEAD_DIM = 5, 27, 21


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
        return tuple(attention_reference.head_parts(p, _HEADS, _HEAD_DIM) for p in plain)  # type: ignore[arg-type]

    own, common = run.rounded(own), run.rounded(common)
    for y, exact in zip(got, made(own, common), strict=True):
        run.compare_exactly(y, exact)
    exact_own, exact_common = grads(made, dys, own, common, of=2)
    run.compare(got_own, exact_own)
    run.compare(got_common, exact_common)
