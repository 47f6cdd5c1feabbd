"""Vectors in several pieces, which give the bits of one."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from qlora_wgpu.graph.sharded_vector import Pieces
from qlora_wgpu.lora.moments import MOMENT_VALUES
from qlora_wgpu.ops.moments import BlockTable, Span
from qlora_wgpu.ops.optimizers import AdamWConfig, AdamWState, adamw, adamw_8bit
from qlora_wgpu.ops.tensor import add_to, fill_zero
from qlora_wgpu.selfcheck.cases.common import each, normal
from qlora_wgpu.selfcheck.runner import Array, Runner

_SPANS = [Span(0, 37, 131, 136), Span(5056, 41, 101, 104), Span(9344, 5, 83, 88)]
_CUTS, _LENGTH = [5056, 9344], 9344 + 5 * 88


@each((False,), (True,))
def check_update_in_pieces(run: Runner, in_codes: bool) -> None:
    """Two gradients are summed, and clipped: neither sums nor updates depend on the cuts."""
    results = [_updated(run, cuts, in_codes=in_codes) for cuts in ([], _CUTS)]
    for whole, cut in zip(*results, strict=True):
        run.compare_exactly(cut.astype(np.float64), whole.astype(np.float64))


def _updated(run: Runner, cuts: list[int], *, in_codes: bool) -> list[Array]:
    """The bits of the vectors, moments and sums after an update."""
    blocks = BlockTable(_SPANS, MOMENT_VALUES, cuts)
    p, g, more, m, v = (_pieces(run, _values(name), cuts) for name in ("p", "g", "h", "m", "v"))
    info, stats = (
        _pieces(run, values, []).whole for values in ([1e-2, 0.1, 0.03, 2e-2], [9.0, 7.0, 0.0, 0.0])
    )
    if in_codes:
        m, v = blocks.new_moment("m"), blocks.new_moment("v")
        for piece in (*m.pieces, *v.pieces):
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
    bits = run.run_bits(*(piece for each in vectors for piece in each.pieces), stats)
    run.graph.launches.clear()
    found, rows = [], iter(row[0] for row in bits)
    for each_vector in vectors:
        found.append(np.concatenate([next(rows) for _ in each_vector.pieces]))
    return [*found, next(rows)]


def _values(name: str) -> Array:
    """Normal numbers in tensors of these spans, with zeros between them."""
    flat = np.zeros(_LENGTH)
    for span in _SPANS:
        rows = flat[span.offset :][: span.rows * span.stride].reshape(span.rows, -1)
        rows[:, : span.columns] = normal(name, span.rows, span.columns)
    return np.abs(flat) if name == "v" else flat


def _pieces(run: Runner, values: Array | list[float], cuts: list[int]) -> Pieces:
    flat = np.asarray(values, np.float32)
    ends = pairwise([0, *cuts, flat.size])
    pieces = Pieces.laid_out("flat", "check", "float32", [end - begin for begin, end in ends])
    for (begin, _), piece in zip(pairwise([0, *cuts, flat.size]), pieces.pieces, strict=True):
        assert piece.storage is not None
        piece.storage.data = flat[begin : begin + piece.columns]
    return pieces
