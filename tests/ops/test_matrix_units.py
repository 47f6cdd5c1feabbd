"""Products on matrix units, where the GPU has some; where not, they are not chosen."""

import dataclasses

import numpy as np
import pytest
from support.harness import PROFILES, Bench
from support.matrix_units import FLOATS, HALVES, emulated

from ops import test_cross_entropy, test_experts, test_linear, test_streamed_head
from qlora_wgpu.gpu import probe
from qlora_wgpu.gpu.kernel_config import gpu_profile
from qlora_wgpu.gpu.matrix import MatrixShape, MatrixTile
from qlora_wgpu.graph.tensor import Storage, vector
from qlora_wgpu.kernels.common import EXPERT_TILE, ExpertTiles
from qlora_wgpu.kernels.gemm import GEMM, Gemm, LoraTerm, factors_of
from qlora_wgpu.selfcheck.cases import cases_for
from qlora_wgpu.selfcheck.cases.linear import Sizes
from qlora_wgpu.selfcheck.runner import Runner
from qlora_wgpu.tuning.tuner import candidates


@pytest.fixture(scope="module")
def shape(device):
    return probe.matrix_units(device).shape


def test_the_self_test_agrees_with_what_is_listed(device, shape):
    listed = device.backend.matrix_shapes(device.gpu)
    assert (shape is None) == (not listed)
    assert shape is None or shape in listed


@pytest.mark.parametrize("sized", [True, False])
def test_a_subgroup_size_that_is_not_the_drivers_is_refused(device, shape, monkeypatch, sized):
    if shape is None:
        return  # tests/gpu/test_probe.py has it of a driver that is made up
    wider = dataclasses.replace(shape, threads=2 * shape.threads)
    if not sized:
        monkeypatch.setattr(device, "features", device.features - {"subgroup-size-control"})
    monkeypatch.setattr(device.backend, "matrix_shapes", lambda adapter: (wider,))
    units = probe.matrix_units(device)
    assert units.shape is None
    assert ("not 16" in units.refusal) if not sized else ("compiling" in units.refusal)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("index", range(8))
def test_products(device, shape, monkeypatch, index, dtype):
    # Without matrix units this runs the same cuts with the float32 tiles in their place.
    profile = gpu_profile(shape or MatrixShape(16, 16, 16, 32), device.limits)
    tried = [profile, *candidates(profile)][index]
    if shape is None and tried.gemm_kind == "matrix":
        tried = dataclasses.replace(tried, gemm_kind="tiled")
    monkeypatch.setitem(PROFILES, "tried", tried)
    for p, output in ((0.0, "residual"), (0.3, "operand")):
        sizes = Sizes(37, 76, 100, 5, shard=100)
        test_linear.check(device, "tried", dtype, sizes, bias=True, output=output, p=p)
    test_linear.check(device, "tried", dtype, Sizes(150, 136, 261, 8, shard=136))
    test_cross_entropy.run(device, tried, dtype, 37, 331, 68, 0.7)
    test_cross_entropy.run(device, tried, dtype, 9, 4099, 68, 0.7)
    # Tiles of experts are no higher than their rows.
    for sizes in ((70, 3, 2, 136, 100, 5, 1), (40, 5, 2, 72, 136, 8, 2)):
        test_experts.test_a_mixture(device, "tried", dtype, True, *sizes)


INTEL = {"f16 8x8x16": MatrixShape(8, 8, 16, 8), "f16 8x16x16": MatrixShape(8, 16, 16, 16)}
PLAIN = {"f16": HALVES, "f32": FLOATS, **INTEL}  # in plain WGSL


@pytest.fixture(params=["own", *PLAIN])
def units(request, device, shape, monkeypatch):
    """Matrix units: the GPU's, or those of either type that are plain WGSL."""
    if request.param == "own":
        return shape
    backend, original = device.backend, device.backend.compile
    monkeypatch.setattr(
        backend, "compile", lambda raw, code, label: original(raw, emulated(code), label)
    )
    monkeypatch.setattr(device, "_pipelines", {})
    return PLAIN[request.param]


def profile_of(device, shape, *, deep=False):
    """The profile of matrix units; those in plain WGSL have tiles small enough for it."""
    tile = {"matrix_tile": (1, 2, 2, 1)} if shape in PLAIN.values() else {}
    tile = {"matrix_tile": (2, 2, 1, 2)} if shape in INTEL.values() else tile
    profile = gpu_profile(shape, device.limits, deep_tiles=deep)
    return dataclasses.replace(profile, matrix_deep=deep, **tile)


@pytest.mark.slow
@pytest.mark.cover("values", check=["linear"], units=["f16"], deep=[False])
@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("check", ["linear", "linear_group", "trained_matrix", "experts"])
def test_layers(device, units, check, deep):
    if units is None:
        return
    profile = profile_of(device, units, deep=deep)
    assert profile.tile_on_matrix_units().deep == deep
    cases = [case for case in cases_for(profile) if case.check == check and not case.in_textures]
    for case in cases[:3]:
        run = Runner(device, profile, "bfloat16")
        case.function(run, *case.arguments)
        assert run.excess < 1, case.arguments


@pytest.mark.cover(units=["f16 8x16x16", "f32"])
def test_a_streamed_head(device, units):
    if units is not None:
        test_streamed_head.check(device, profile_of(device, units), "bfloat16", 68)


def product(device, shape, x, w, *, with_rows, counts=None, term=None, scale=1.0, tile=None,
            deep=False):  # fmt: skip
    """x·w on matrix units; ``term`` are u and the adapter's factor."""
    profile = profile_of(device, shape, deep=deep)
    profile = dataclasses.replace(profile, matrix_tile=tile or profile.matrix_tile)
    bench = Bench(device, "bfloat16", profile)
    bench.graph.saturated = counts
    y = bench.output(x.shape[0], w.shape[0] if with_rows else w.shape[1])
    tx, tw = (bench.given(a, "bfloat16") for a in (x, w))
    lora = None if term is None else LoraTerm(*(bench.given(a, "float32") for a in term), 0)
    GEMM.launch(bench.graph, Gemm(tx, tw, y, with_rows, scale=scale, lora=lora))
    assert any(launch.constants.get("MATRIX") for launch in bench.graph.launches)
    return bench.run(y)[0]


@pytest.mark.cover(units=["f16", "f32"])
@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("with_rows", [True, False])
def test_the_self_test_makes_the_tile_of_products(device, units, with_rows, deep):
    if units is not None:
        tile = MatrixTile(units, 1, 2, 2, 1, deep)
        assert probe.tile_problem(device, tile, with_rows=with_rows) == ""


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("depth", [75, 128])  # of whole tiles, and not
@pytest.mark.parametrize("with_rows", [True, False])
def test_a_product_of_many_tiles(device, units, with_rows, depth, deep):
    """The last rows and columns fill no tile, and those behind them are not there."""
    if units is None:
        return
    random = np.random.default_rng(4)
    bench = Bench(device, "bfloat16", PROFILES["gpu"])
    x, w = (bench.rounded(random.normal(size=size)) for size in ((70, depth), (depth, 100)))
    u, a = random.normal(size=(70, 9)), random.normal(size=(9, 100))
    y = product(device, units, x, w.T if with_rows else w, with_rows=with_rows, deep=deep,
                term=(u, a.T if with_rows else a))  # fmt: skip
    expected = x @ w + u @ a
    assert np.abs(y - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("with_rows", [True, False])
def test_more_rows_of_tiles_than_a_band(device, units, with_rows):
    if units is None:
        return
    random = np.random.default_rng(5)
    bench = Bench(device, "bfloat16", PROFILES["gpu"])
    rows = 9 * profile_of(device, units).tile_on_matrix_units().rows + 5
    x, w = (bench.rounded(random.normal(size=size)) for size in ((rows, 64), (64, 100)))
    y = product(device, units, x, w.T if with_rows else w, with_rows=with_rows)
    assert np.abs(y - x @ w).max() < 1e-5 * np.abs(x @ w).max()


@pytest.mark.parametrize("depth", [75, 96])
@pytest.mark.parametrize("with_rows", [True, False])
@pytest.mark.parametrize("tile", [(2, 4, 1, 1), (8, 1, 1, 1)])
def test_a_tile_with_fewer_units_than_invocations(device, units, tile, with_rows, depth):
    """Of x, as a Battlemage's tile has it, or of w."""
    if units != INTEL["f16 8x16x16"]:
        return
    random = np.random.default_rng(8)
    bench = Bench(device, "bfloat16", PROFILES["gpu"])
    x, w = (bench.rounded(random.normal(size=size)) for size in ((70, depth), (depth, 100)))
    u, a = random.normal(size=(70, 9)), random.normal(size=(9, 100))
    y = product(device, units, x, w.T if with_rows else w, with_rows=with_rows, tile=tile,
                term=(u, a.T if with_rows else a))  # fmt: skip
    expected = x @ w + u @ a
    assert np.abs(y - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("widths", [(64, 32, 32), (32, 32), (72, 32, 24)])
def test_layers_of_one_input_meet_within_tiles_or_between_them(device, units, widths):
    if units is None:
        return
    random = np.random.default_rng(6)
    bench = Bench(device, "bfloat16", profile_of(device, units))
    xs = [bench.rounded(random.normal(size=(70, width))) for width in widths]
    w = bench.rounded(random.normal(size=(sum(widths), 100)))
    first, *others = (bench.given(x, "bfloat16") for x in xs)
    y = bench.output(70, 100)
    tw = bench.given(w, "bfloat16")
    GEMM.launch(bench.graph, Gemm(first, tw, y, False, others=tuple(others)))
    # Copies of f16 lie side by side.
    between = units.element == "f16" or all(width % 32 == 0 for width in widths)
    assert bench.graph.launches[-1].constants["WHOLE_K"] == between
    (got,) = bench.run(y)
    expected = np.concatenate(xs, axis=1) @ w
    assert np.abs(got - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("depth", [200, 192])
def test_nothing_is_clamped_without_a_word(device, units, depth):
    if units is None:
        return
    x = np.ones((70, depth))
    x[3, 7], x[5, 9], x[8, 2], x[69, -1], x[9, 1] = np.nan, np.inf, -np.inf, 1e5, 65280.0
    x[11, 3], x[12, 4], x[7, -1] = -1e38, -65536.0, np.inf
    w = np.ones((150, depth))
    storage = Storage("saturated", "test", 16, np.zeros(4, np.uint32))
    counts = vector("saturated", 4, "uint32", storage)
    y = product(device, units, x, w, with_rows=True, counts=counts)
    others = depth - 1
    assert np.isnan(y[3]).all() and (y[[5, 7]] == np.inf).all() and (y[8] == -np.inf).all()
    assert (y[9] == 65280 + others).all() and (y[10] == depth).all()
    held = [65504.0, -65504.0, -65504.0]
    if units.element == "f32":  # which holds all that bfloat16 does
        held = Bench(device, "bfloat16", PROFILES["gpu"]).rounded([1e5, -1e38, -65536.0])
    assert np.allclose(y[[69, 11, 12]], np.array(held)[:, None] + others, rtol=1e-6)
    if units.element == "f16":
        assert np.frombuffer(device.read(storage.buffer, 4), np.uint32) == [3]


def test_weights_are_counted_by_one_workgroup(device, units):
    """Among them the last of the last row, which columns and units past the end repeat."""
    if units is None:
        return
    x, w = np.ones((70, 75)), np.ones((100, 75))
    w[0, 0], w[99, 74], w[50, 30] = 1e5, -1e6, 65504.0
    storage = Storage("saturated", "test", 16, np.zeros(4, np.uint32))
    counts = vector("saturated", 4, "uint32", storage)
    y = product(device, units, x, w, with_rows=True, counts=counts)
    w = Bench(device, "bfloat16", PROFILES["gpu"]).rounded(w)
    held = np.clip(w, -65504.0, 65504.0) if units.element == "f16" else w
    assert np.allclose(y, x @ held.T, rtol=1e-6)
    if units.element == "f16":
        beyond = int((np.abs(w) > 65504).sum())
        assert np.frombuffer(device.read(storage.buffer, 4), np.uint32) == [beyond]


def test_values_of_experts_are_counted_by_the_product_that_has_them(device, units):
    if units is None:
        return
    bench = Bench(device, "bfloat16", profile_of(device, units))
    storage = Storage("saturated", "test", 16, np.zeros(4, np.uint32))
    bench.graph.saturated = vector("saturated", 4, "uint32", storage)
    x, w = np.ones((4 * EXPERT_TILE, 40)), np.ones((2 * 100, 40))
    w[100:] = 2.0
    x[3, 7], x[70, 1], x[130, 39], x[131, 39] = 1e5, 2e5, -3e5, 1e5  # the second tile is nobody's
    owners = bench.given(np.array([1, 0xFFFFFFFF, 0, 1]), "uint32")
    tx, y = bench.given(x, "bfloat16"), bench.given(np.zeros((len(x), 100)))
    for expert in (0, 1):
        here = ExpertTiles(owners, owners, expert, 1)
        tw = bench.given(w[100 * expert : 100 * (expert + 1)], bench.graph.weight_dtype)
        GEMM.launch(bench.graph, Gemm(tx, tw, y, True, experts=here))
    (got,) = bench.run(y)
    assert not got[EXPERT_TILE : 2 * EXPERT_TILE].any() and (got[-1] == 80).all()
    assert (got[0] == 80).all() and (got[2 * EXPERT_TILE] == 40).all()
    if units.element == "f16":
        assert (got[3] == 2 * (65504 + 39)).all()
        assert np.frombuffer(device.read(storage.buffer, 4), np.uint32) == [3]


@pytest.mark.parametrize("size", [1e-12, 1e-30, 1.0, 1e6, 1e30])
def test_gradients_of_any_size_keep_their_precision(device, units, size):
    if units is None:
        return
    random = np.random.default_rng(1)
    dy = size * random.normal(size=(70, 96)).astype(np.float32)
    dy[64:] *= 1e-4
    dy[40, 3], dy[41, 95] = np.nan, -np.inf
    w = random.normal(size=(96, 100))
    bench = Bench(device, "bfloat16", PROFILES["gpu"])
    dy, w = bench.rounded(dy), bench.rounded(w)
    y = product(device, units, dy, w, with_rows=False)
    assert np.isnan(y[40]).all() and np.isinf(y[41]).all()
    y[40:42], dy[40:42] = 0.0, 0.0
    assert np.abs(y - dy @ w).max() < 1e-4 * size
    assert np.abs(y[64:] - (dy @ w)[64:]).max() < 1e-7 * size


@pytest.mark.parametrize("with_rows", [True, False])
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("has_term", [True, False])
def test_what_a_product_is_added_to(device, units, with_rows, scale, has_term):
    if units is None:
        return
    random = np.random.default_rng(5)
    bench = Bench(device, "bfloat16", profile_of(device, units))
    x, w = (bench.rounded(random.normal(size=size)) for size in ((70, 75), (75, 100)))
    u, a, skip = (random.normal(size=size) for size in ((70, 5), (5, 100), (70, 100)))
    tx, tw = (bench.given(m, "bfloat16") for m in (x, w.T if with_rows else w))
    lora = LoraTerm(bench.given(u), bench.given(a.T if with_rows else a), 0) if has_term else None
    given = bench.given(skip)
    y = bench.output(70, 100) if with_rows else given
    gemm = Gemm(tx, tw, y, with_rows, scale=scale, lora=lora, accumulate=not with_rows,
                residual=given if with_rows else None)  # fmt: skip
    GEMM.launch(bench.graph, gemm)
    constants = bench.graph.launches[-1].constants
    assert constants["LOADS"] == (scale == 1.0 and (with_rows or units.element == "f32"))
    (got,) = bench.run(y)
    expected = scale * x @ w + skip + (u @ a if has_term else 0.0)
    assert np.abs(got - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("with_rows", [True, False])
@pytest.mark.parametrize(
    ("u_size", "factor_size", "x_size"),
    [(1, 1, 1), (1e6, 1e-6, 1), (1e-9, 1e-4, 1), (3e5, 7e4, 1), (1, 0, 1), (1e-24, 1e-3, 1e-21)],
)
@pytest.mark.parametrize("r", [3, 16])
def test_a_term_has_the_precision_of_float32(
    device, units, with_rows, u_size, factor_size, x_size, r
):
    if units is None:
        return
    random = np.random.default_rng(3)
    bench = Bench(device, "bfloat16", PROFILES["gpu"])
    x, w = (bench.rounded(random.normal(size=size)) for size in ((70, 75), (75, 100)))
    # Forward's x is not scaled; weights below f16's end lose digits by themselves.
    x, w = bench.rounded((1 if with_rows else x_size) * x), w * (abs(w) > 1e-4)
    u = u_size * random.normal(size=(70, r)).astype(np.float32)
    u[:, 1] *= 1e-5
    a = factor_size * random.normal(size=(r, 100)).astype(np.float32)
    y = product(device, units, x, w.T if with_rows else w, with_rows=with_rows,
                term=(u, a.T if with_rows else a), scale=0.3)  # fmt: skip
    base, added = 0.3 * x @ w, u.astype(np.float64) @ a
    most = np.abs(u).astype(np.float64) @ np.abs(a)
    # What f16 alone would leave of the term is off by 2e-4.
    assert (np.abs(y - base - added) < 1e-6 * (np.abs(base).max() + most + np.abs(y))).all()


@pytest.mark.parametrize("with_rows", [True, False])
def test_the_largest_of_a_term_may_lie_anywhere(device, units, with_rows):
    """What is far beyond all others, and beyond f16, of u and of the adapter, at each place."""
    if units is None:
        return
    x, w = np.ones((70, 75)), np.ones((75, 100))
    for place in range(8):
        u, a = np.full((70, 9), 0.5), np.full((9, 100), 0.25)
        u[3 + place, place], a[place, 90 + place] = 3e5, -7e5
        y = product(device, units, x, w.T if with_rows else w, with_rows=with_rows,
                    term=(u, a.T if with_rows else a))  # fmt: skip
        exact = x @ w + u @ a
        assert (np.abs(y - exact) <= 1e-6 * np.abs(u) @ np.abs(a) + 1e-6 * 75).all()


@pytest.mark.parametrize("with_rows", [True, False])
def test_a_term_that_is_no_number_stays_none(device, units, with_rows):
    if units is None:
        return
    x, w, u, a = np.ones((70, 75)), np.ones((75, 100)), np.ones((70, 5)), np.ones((5, 100))
    u[3, 1], u[20, 4], u[40, 0] = np.nan, np.inf, 1e30
    y = product(device, units, x, w.T if with_rows else w, with_rows=with_rows,
                term=(u, a.T if with_rows else a))  # fmt: skip
    finite = np.isfinite(y).all(axis=1)
    assert not np.isfinite(y[[3, 20]]).any() and finite.sum() == 68
    assert np.allclose(y[40], 1e30) and np.allclose(y[65:], 80)


@pytest.mark.parametrize("tile_rows", [8, 16, 64])
def test_factors_are_scaled_by_what_is_finite_in_a_tile(device, tile_rows):
    random = np.random.default_rng(2)
    bench = Bench(device, "bfloat16", PROFILES["gpu"])
    sizes = 10.0 ** random.integers(-9, 9, (37, 1))
    x = bench.rounded(random.normal(size=(37, 4500)) * sizes)  # chunks of 2,048
    x[4, 5], x[4, 4006], x[20, 0] = np.nan, np.inf, -np.inf
    like = bench.given(np.ones((4500, 8)), "bfloat16")
    gemm = Gemm(bench.given(x, "bfloat16"), like, bench.output(37, 8), False)
    factors = factors_of(bench.graph, gemm, tile_rows)
    (got,) = bench.run(factors.x)
    (exponents,) = bench.run_bits(factors.exponents)
    for tile, first in enumerate(range(0, 37, tile_rows)):
        rows = x[first : first + tile_rows]
        largest = np.abs(rows[np.isfinite(rows)]).max()
        exponent = 14 - int(np.floor(np.log2(largest)))
        assert exponents[0, tile] == exponent + 127
        exact = np.float16(rows * 2.0**exponent).astype(np.float64)
        assert np.array_equal(got[first : first + tile_rows], exact, equal_nan=True)
