"""Ops and their gradients by their formulas: the checks of a driver, held to less than it is."""

from collections import Counter
from dataclasses import replace

import pytest
from support.harness import PROFILES, VARIANTS, Bench

from qlora_wgpu.selfcheck import runner
from qlora_wgpu.selfcheck.cases import (
    attention,
    cases_for,
    columns,
    delta_net,
    norms,
    pointwise,
)

MODULES = (pointwise, norms, columns, attention, delta_net)
OTHERS = (
    "balance_of_experts", "dropout_parts", "embedding_pair", "expert_scores", "factors",
    "scaled_weights",
)  # fmt: skip
COUNTS = Counter(
    case.check
    for case in cases_for(PROFILES["cpu"])
    if case.check in OTHERS
    or any(case.function.__module__ == module.__name__ for module in MODULES)
)
CASES = 4
"""Cases of a test, which compiles their shaders where no test has done so before."""
PARTS = [
    pytest.param((check, part, parts), id=f"{check}-{part}" if parts > 1 else check)
    for check, count in COUNTS.items()
    for parts in [-(-count // CASES)]
    for part in range(parts)
]
REPEATED = [
    ("attention", 1), ("attention", 2), ("attention_of_blocks", 0), ("gated_delta_rule", 0),
]  # fmt: skip


# These are repeated by tests of their own.
@pytest.mark.cover(cases=[p.values[0] for p in PARTS if p.values[0][:2] not in REPEATED])
@pytest.mark.quick("values")
@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("cases", PARTS)
def test_ops_by_their_formulas(device, profile, dtype, cases, monkeypatch):
    monkeypatch.setattr(runner, "SUMS", 4e-6)  # exp is good to 1e-6, sums of float32 in any order
    check, part, parts = cases
    chosen = [case for case in cases_for(PROFILES[profile]) if case.check == check]
    for case in chosen[part::parts]:
        own = replace(PROFILES[profile], in_textures=case.in_textures)
        bench = Bench(device, dtype, own)
        case.function(bench, *case.arguments)
        assert bench.excess <= 1.0, (case.arguments, case.in_textures, bench.worst)
