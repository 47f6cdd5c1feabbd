"""Matrix units are used as far as the driver keeps to what a kernel counts on."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from qlora_wgpu.errors import DeviceError
from qlora_wgpu.gpu import probe
from qlora_wgpu.gpu.kernel_config import gpu_profile, plainer
from qlora_wgpu.gpu.matrix import WHOLE, Limits, MatrixShape, MatrixTile, fitting_tiles
from qlora_wgpu.kernels.common import EXPERT_TILE
from qlora_wgpu.kernels.gemm.launch import SIZED_ROWS
from qlora_wgpu.kernels.gemm.problem import PART_UNIT
from qlora_wgpu.tuning.tuner import candidates

SHAPE = MatrixShape(16, 16, 16, 32)
LARGE = Limits(1024, 49_152)


def device_with(*shapes, limits=LARGE):
    backend = SimpleNamespace(matrix_shapes=lambda gpu: shapes)
    features = {"subgroup-matrix", "subgroups"}
    gpu = SimpleNamespace(info={})
    return SimpleNamespace(backend=backend, gpu=gpu, features=features, limits=limits)


def driver(monkeypatch, size, spoil=lambda product: product):
    """Makes the probe's workgroup run on a driver with subgroups of this size."""

    def run(device, shader, given, sizes):
        if shader.subgroup_size > 64:
            raise DeviceError("cannot be compiled")
        left, right = given["x"], given["w"]
        with_rows = dict(shader_constants(shader))["W_ROWS"]
        product = left @ (right.T if with_rows else right)
        own = np.arange(sizes["seen"] // 16)
        count = np.full_like(own, len(own) // size)
        seen = np.stack([np.full_like(own, size), count, own // size, own % size], 1)
        product = np.ascontiguousarray(spoil(product), np.float32)
        return {"seen": seen.astype(np.uint32).tobytes(), "y": product.tobytes()}

    monkeypatch.setattr(probe, "_run", run)


def shader_constants(shader):
    for part in shader.label.partition("(")[2].rstrip(")").split(", "):
        name, _, value = part.partition("=")
        yield name, value == "True" if value in ("True", "False") else value


def test_a_driver_that_keeps_its_word(monkeypatch):
    driver(monkeypatch, 32)
    assert probe.matrix_units(device_with(SHAPE)) == probe.MatrixUnits(SHAPE)
    assert probe.matrix_units(device_with()).refusal
    nothing = dataclasses.replace(SHAPE, threads=128)
    units = probe.matrix_units(device_with(nothing, SHAPE))
    assert units.shape == SHAPE  # one that is refused does not stand in another's way


@pytest.mark.parametrize("size", [8, 16, 64])
def test_another_size_of_subgroups_is_refused(monkeypatch, size):
    driver(monkeypatch, size)
    units = probe.matrix_units(device_with(SHAPE))
    assert units.shape is None
    assert f"expected subgroups of 32 invocations in order, got {size}" in units.refusal


@pytest.mark.parametrize("spoil", [np.negative, lambda p: p[::-1], lambda p: p + (p == p.max())])
def test_wrong_products_are_refused(monkeypatch, spoil):
    driver(monkeypatch, 32, spoil)
    units = probe.matrix_units(device_with(SHAPE))
    assert units.shape is None and "wrong products" in units.refusal


def test_limits_choose_the_tile(monkeypatch):
    driver(monkeypatch, 32)
    assert gpu_profile(SHAPE, LARGE).matrix_tile == (2, 4, 4, 2)
    assert gpu_profile(SHAPE, Limits(128, 49_152)).matrix_tile == (2, 2, 4, 4)
    assert gpu_profile(SHAPE, Limits(256, 16_384)).matrix_tile == (2, 2, 2, 2)
    tiny = Limits(16, 16_384)
    assert gpu_profile(SHAPE, tiny).gemm_kind != "matrix"
    assert "no tile is within" in probe.matrix_units(device_with(SHAPE, limits=tiny)).refusal


@pytest.mark.parametrize(
    ("m", "n", "k", "named"),
    [(12, 16, 16, "m"), (4, 16, 16, "m"), (128, 16, 16, "m"), (24, 16, 16, "m"),
     (16, 12, 16, "n"), (16, 16, 4, "k"), (16, 16, 64, "k"), (0, 16, 16, "m")],
)  # fmt: skip
def test_sizes_that_kernels_do_not_count_on_are_refused(monkeypatch, m, n, k, named):
    """Sums' parts would end within tiles, tiles of rows would have no size, or two experts."""
    driver(monkeypatch, 32)
    shape = MatrixShape(m, n, k, 32)
    units = probe.matrix_units(device_with(shape, limits=Limits(1024, 1 << 20)))
    assert (
        units.shape is None and f"{shape}: {named} must be a power of two from 8" in units.refusal
    )
    assert gpu_profile(shape, Limits(1024, 1 << 20)).gemm_kind == "tiled"
    assert probe.matrix_units(device_with(shape, SHAPE)).shape == SHAPE


def test_tiles_divide_what_they_must():
    assert PART_UNIT == EXPERT_TILE == WHOLE
    for shape in (SHAPE, MatrixShape(64, 64, 32, 64), MatrixShape(8, 8, 8, 8)):
        limits = Limits(1024, 1 << 20)
        for tile in (*fitting_tiles(shape, limits), *fitting_tiles(shape, limits, deep=True)):
            assert tile.groups_m * tile.groups_n > 1  # Apple's compiler miscompiles those of one
            assert WHOLE % tile.depth == 0 == WHOLE % tile.of_rows(EXPERT_TILE).rows
            assert tile.of_rows(EXPERT_TILE).rows % SIZED_ROWS == 0 == tile.rows % SIZED_ROWS


ALCHEMIST, BATTLEMAGE = MatrixShape(8, 8, 16, 8), MatrixShape(8, 16, 16, 16)
M1 = MatrixShape(8, 8, 8, 32, "f32")


@pytest.mark.parametrize(
    ("shape", "tile", "attention"),
    [
        (ALCHEMIST, (8, 4, 1, 2), "tiled"),
        (BATTLEMAGE, (8, 4, 1, 2), "tiled"),
        (M1, (2, 4, 4, 2), "matrix"),
    ],
)
def test_few_registers_hold_few_sums(monkeypatch, shape, tile, attention):
    """Intel's compiler spilled 10 to 600 registers of tiles with more sums an invocation."""
    own = gpu_profile(shape, LARGE, few_registers=True)
    assert (own.gemm_kind, own.matrix_tile, own.attention_kind) == ("matrix", tile, attention)
    assert gpu_profile(shape, LARGE).attention_kind == "matrix"
    assert gpu_profile(shape, LARGE).matrix_tile == (2, 4, 4, 2)
    for fitting in fitting_tiles(shape, LARGE, few_registers=True):
        assert fitting.sum_registers <= 16
    tried = []
    monkeypatch.setattr(
        probe, "tile_problem", lambda device, tile, with_rows: tried.append(tile) or ""
    )
    device = device_with(shape)
    device.gpu = SimpleNamespace(info={"vendor": "intel"})
    probe.matrix_units(device)
    assert {(t.groups_m, t.groups_n, t.fragments_m, t.fragments_n) for t in tried} == {tile}


def test_tiles_are_deep_where_they_may(monkeypatch):
    deep = gpu_profile(SHAPE, LARGE, deep_tiles=True)
    assert deep.matrix_deep and deep.tile_on_matrix_units().depth == 4 * SHAPE.k
    # Not with too little memory, nor where that is more than parts of sums are made of.
    small = Limits(1024, 32_768)
    assert gpu_profile(SHAPE, small, deep_tiles=True) == gpu_profile(SHAPE, small)
    for limits, may in ((LARGE, True), (small, False)):  # then a tuner tries none either
        tried = candidates(gpu_profile(SHAPE, limits))
        assert any(each.matrix_deep for each in tried) == may
    wide = MatrixShape(16, 16, 32, 32)
    assert gpu_profile(wide, LARGE, deep_tiles=True) == gpu_profile(wide, LARGE)
    tried = []
    monkeypatch.setattr(
        probe, "tile_problem", lambda device, tile, with_rows: tried.append(tile) or ""
    )
    device = device_with(SHAPE)
    device.gpu = SimpleNamespace(info={"vendor": "NVIDIA", "vendor_id": 0x10DE})
    probe.matrix_units(device)
    assert all(tile.deep for tile in tried)


@pytest.mark.parametrize("element", ["f16", "f32"])
def test_memory_is_counted_as_the_shader_takes_it(element):
    """By the declarations of `common/tile_matrix.wgsl` and `common/tile_matrix_term.wgsl`."""
    term = 4 * (2 * 16 + 2) if element == "f16" else 0
    shape = MatrixShape(8, 16, 16, 32, element)
    for tile in (*fitting_tiles(shape, LARGE), *fitting_tiles(shape, LARGE, deep=True)):
        for with_rows in (True, False):
            c = tile.constants(with_rows=with_rows)
            vector = 8 if element == "f16" else 4
            x = tile.rows * (c["TILE_K"] // vector + 1)
            across = (c["TILE_K"] if with_rows else tile.columns) // vector + 1
            down = tile.columns if with_rows else c["TILE_K"]
            taken = 16 * (x + down * across) + 4 * c["GROUPS_M"] * c["GROUPS_N"] * 8 * 16
            taken += term
            assert tile.workgroup_bytes(with_rows=with_rows) == taken <= LARGE.workgroup_bytes


def test_tiles_of_experts_keep_their_subgroups():
    for numbers in ((2, 4, 4, 2), (4, 2, 2, 4), (2, 2, 4, 4), (1, 1, 8, 1)):
        tile = MatrixTile(SHAPE, *numbers).of_rows(64)
        assert tile.rows <= 64 and 64 % tile.rows == 0
        assert tile.invocations == MatrixTile(SHAPE, *numbers).invocations


def test_what_is_wrong_gives_way_to_the_plainer():
    kinds, profile = [], gpu_profile(SHAPE, LARGE)
    while profile is not None:
        kinds.append((profile.gemm_kind, profile.attention_kind))
        profile = plainer(profile)
    assert kinds == [
        ("matrix", "matrix"), ("matrix", "tiled"), ("tiled", "tiled"), ("register", "register"),
    ]  # fmt: skip
