"""Grids of more workgroups than WebGPU dispatches along a dimension."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from support.harness import PROFILES, Bench, assert_close, tolerance

from qlora_wgpu.config import LoraConfig
from qlora_wgpu.errors import OutOfMemoryError
from qlora_wgpu.families.family import LinearSpec
from qlora_wgpu.gpu import wgsl
from qlora_wgpu.graph import graph as graphs
from qlora_wgpu.graph import passes
from qlora_wgpu.kernels.gemm import GEMM, Gemm
from qlora_wgpu.kernels.lora import DOWN, UP_GRAD, LoraA, LoraBGradInput
from qlora_wgpu.selfcheck import results, variants
from qlora_wgpu.selfcheck.cases import cases_for
from qlora_wgpu.selfcheck.cases.common import filled_adapter

LIMIT = 40
ROWS = 16 * LIMIT  # that the shared thin products take within it


@pytest.mark.parametrize("workgroups", [(8, 1, 1), (3, 11, 1), (2, 3, 8), (1, 1, 49)])
def test_every_place_of_a_grid_is_dispatched_once(monkeypatch, workgroups):
    monkeypatch.setattr(wgsl, "MAX_WORKGROUPS", 7)
    assert wgsl.fold_grid((7, 6, 7)) == ((7, 6, 7), {})
    dispatched, constants = wgsl.fold_grid(workgroups)
    assert max(dispatched) <= 7 and dispatched[2] == 1
    assert tuple(constants[name] for name in wgsl.GRID) == workgroups
    x, y, z = workgroups
    rectangle = itertools.product(range(dispatched[1]), range(dispatched[0]))
    indices = [row * constants[wgsl.FOLD] + column for row, column in rectangle]
    places = [(i % x, i // x % y, i // (x * y)) for i in indices if i < x * y * z]
    assert sorted(places) == sorted(itertools.product(*map(range, workgroups)))


@pytest.fixture
def folding(monkeypatch):
    """Everything is dispatched three workgroups wide, whatever its grid."""

    def fold_grid(workgroups):
        if np.prod(workgroups) == 1:
            return workgroups, {}
        constants = dict(zip(wgsl.GRID, workgroups, strict=True))
        return folded(int(np.prod(workgroups))), {**constants, wgsl.FOLD: 3}

    def folded(count):
        return (3, -(-count // 3), 1)

    monkeypatch.setattr(graphs, "fold_grid", fold_grid)
    for module in (graphs, passes):
        monkeypatch.setattr(module, "fold_workgroups", folded)
    yield
    wgsl.load_shader.cache_clear()


@pytest.mark.full
@pytest.mark.parametrize(
    ("variant", "name"),
    [  # grids of three dimensions, of two with barriers, of rows, of subgroups and of experts
        ("own", "attention"),
        ("as on GPUs", "rms_norm"),
        ("own", "dora_norms"),
        ("own", "experts"),
    ],
)
def test_kernels_compute_the_same_on_a_folded_grid(device, folding, variant, name):
    profile = variants(device).get(variant, device.profile)
    cases = [case for case in cases_for(profile) if case.check == name]
    result = results._result(device, cases, variant, profile, "float32")
    assert result.good, result


@pytest.mark.parametrize("rows", [ROWS, ROWS + 1])
def test_thin_products_of_many_rows(device, monkeypatch, rows):
    """On both sides of the limit, which is 1,048,560 rows in truth."""
    monkeypatch.setattr(wgsl, "MAX_WORKGROUPS", LIMIT)
    # Any number of workgroups is enough, as it is with so many rows.
    bench = Bench(device, "float32", replace(PROFILES["gpu"], least_workgroups=0))
    adapter, parts = filled_adapter(LoraConfig(r=2, lora_alpha=2), [LinearSpec("m.x", 3, 5)])
    lora, (a, b) = adapter.loras["m.x"], parts.values()
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((rows, 5)), rng.standard_normal((rows, 3))
    u, du = bench.graph.float32("u", rows, 2), bench.graph.float32("du", rows, 2)
    DOWN.launch(bench.graph, LoraA(bench.operand(x), lora, u, bench.batch_of(1, 1).info))
    UP_GRAD.launch(bench.graph, LoraBGradInput(bench.operand(dy), lora, du))
    folded = [wgsl.FOLD in launch.constants for launch in bench.graph.launches]
    assert folded == [rows > ROWS] * 2
    got_u, got_du = bench.run(u, du)
    assert_close(got_u, np.float32(x) @ a.T, tolerance("float32"), "sums of five")
    assert_close(got_du, np.float32(dy) @ b, tolerance("float32"), "sums of three")


def test_no_launch_is_traced_beyond_the_limit(device):
    bench = Bench(device, "float32", PROFILES["gpu"])
    x = bench.graph.float32("x", 3, 4)
    bench.graph.launch("tensor/softcap.wgsl", 1, {"y": x}, {"units": 3, "cap": 1.0})
    traced = bench.graph.launches[0]
    with pytest.raises(OutOfMemoryError, match="than kernels support"):
        replace(traced, workgroups=(1, 1, wgsl.MAX_WORKGROUPS + 1))


@pytest.mark.parametrize("profile", list(PROFILES))
def test_products_on_a_folded_grid(device, folding, profile):
    bench = Bench(device, "float32", PROFILES[profile])
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((170, 9)), rng.standard_normal((270, 9))
    y = bench.graph.float32("y", 170, 270)
    GEMM.launch(bench.graph, Gemm(bench.operand(x), bench.operand(w), y, with_rows=True))
    (launch,) = bench.graph.launches
    assert min(launch.constants["GRID_X"], launch.constants["GRID_Y"]) > 1
    (got,) = bench.run(y)
    assert_close(got, np.float32(x) @ np.float32(w).T, tolerance("float32"), "sums of nine")
