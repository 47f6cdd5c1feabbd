"""A gradient that is summed in bfloat16."""

from __future__ import annotations

import numpy as np

from qlora_wgpu.graph.tensor import Storage, Tensor, matrix, stored_bits, stored_floats, vector
from qlora_wgpu.lora.moments import MOMENT_VALUES
from qlora_wgpu.ops.moments import BlockTable, Span
from qlora_wgpu.ops.optimizers import AdamWConfig, AdamWState, adamw, adamw_8bit
from qlora_wgpu.ops.tensor import summed
from qlora_wgpu.selfcheck.cases.common import each, normal
from qlora_wgpu.selfcheck.runner import Array, Runner

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


def _flat(values: Array, dtype: str = "float32") -> Tensor:
    data = stored_bits(values.astype(np.float32), dtype)
    return vector("flat", data.size, dtype, Storage("flat", "check", data.nbytes, data))
