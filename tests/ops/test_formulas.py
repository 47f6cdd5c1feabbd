"""Ops and their gradients by their formulas: the checks of a driver, held to less than it is."""

from dataclasses import replace

import pytest
from support.harness import PROFILES, VARIANTS, Bench

from qlora_wgpu.selfcheck import runner
from qlora_wgpu.selfcheck.cases import (
    attention,
    cases_for,
    checks,
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
NAMES = [
    name
    for name, function in checks().items()
    if name in OTHERS or any(function.__module__ == module.__name__ for module in MODULES)
]


@pytest.mark.quick("values")
@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("check", NAMES)
def test_ops_by_their_formulas(device, profile, dtype, check, monkeypatch):
    monkeypatch.setattr(runner, "SUMS", 4e-6)  # exp is good to 1e-6, sums of float32 in any order
    for case in cases_for(PROFILES[profile]):
        if case.check == check:
            own = replace(PROFILES[profile], in_textures=case.in_textures)
            bench = Bench(device, dtype, own)
            case.function(bench, *case.arguments)
            assert bench.excess <= 1.0, (case.arguments, case.in_textures, bench.worst)
