"""Products on matrix units, where the GPU has some; where not, they are not chosen."""

import dataclasses

import numpy as np
import pytest
from support.harness import PROFILES

from ops import test_cross_entropy, test_experts, test_linear
from qlora_wgpu.gpu import probe
from qlora_wgpu.gpu.backend import MatrixShape
from qlora_wgpu.gpu.profile import gpu_profile
from qlora_wgpu.tuning.candidates import candidates


@pytest.fixture(scope="module")
def shape(device):
    return probe.matrix_shape(device)


def test_the_self_test_agrees_with_what_is_listed(device, shape):
    listed = device.backend.matrix_shapes(device.gpu)
    assert (shape is None) == (not listed)
    assert shape is None or shape in listed


def test_a_wrong_convention_is_found_out(device, shape, monkeypatch):
    # The product is right only if no dimension is taken for another.
    if shape is not None:
        real = np.array_equal
        monkeypatch.setattr(np, "array_equal", lambda actual, expected: real(actual.T, expected))
        assert probe.matrix_shape(device) is None
    assert gpu_profile(None).gemm_kind != "matrix"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("index", range(8))
def test_products(device, shape, monkeypatch, index, dtype):
    # Without matrix units this runs the same cuts with the float32 tiles in their place.
    profile = gpu_profile(shape or MatrixShape(16, 16, 16, 32))
    tried = [profile, *candidates(profile)][index]
    if shape is None and tried.gemm_kind == "matrix":
        tried = dataclasses.replace(tried, gemm_kind="tiled")
    monkeypatch.setitem(PROFILES, "tried", tried)
    for p, residual in ((0.0, True), (0.3, False)):
        test_linear.check(
            device, "tried", dtype, 37, 76, 100, 5, bias=True, residual=residual, p=p, shard=None
        )
    test_linear.check(
        device, "tried", dtype, 150, 136, 261, 8, bias=False, residual=False, p=0.0, shard=136
    )
    test_cross_entropy.run(device, tried, dtype, 37, 331, 68, 0.7)
    test_cross_entropy.run(device, tried, dtype, 9, 4099, 68, 0.7)
    # Tiles of experts are no higher than their rows.
    for sizes in ((70, 3, 2, 136, 100, 5, 1), (40, 5, 2, 72, 136, 8, 2)):
        test_experts.test_a_mixture(device, "tried", dtype, True, *sizes)
