"""Mamba 2's scan: packed samples, chunks of every size, and heads that are launched in blocks."""

import numpy as np
import pytest
from support.harness import PROFILES, Bench, assert_formula

from qlora_wgpu.kernels import mamba_chunks
from qlora_wgpu.kernels import mamba_scan as kernels
from qlora_wgpu.ops.mamba import mamba_scan
from qlora_wgpu.reference import mamba as reference
from qlora_wgpu.selfcheck.cases.common import Exact

HEADS, HEAD_DIM, STATE_SIZE = 8, 16, 24
# Samples packed at odd places, padding between them, behind and before them.
PACKED = np.array(
    [
        [0] * 3 + [4] * 20 + [24] * 2 + [26] + [27] * 24,
        [1] * 37 + [0] * 2 + [40] * 9 + [0] * 2,
    ]
)


def compare(device, chunk, groups, profile="gpu"):
    """y and all gradients of random inputs against the reference."""
    rng, rows = np.random.default_rng(3), PACKED.size
    x, bc = (
        rng.standard_normal((rows, columns))
        for columns in (HEADS * HEAD_DIM, 2 * groups * STATE_SIZE)
    )
    dt, a_log, d = (rng.standard_normal(shape) for shape in ((rows, HEADS), (HEADS,), (HEADS,)))
    bench = Bench(device, "float32", PROFILES[profile])
    batch = bench.batch_of(*PACKED.shape, segments=PACKED)

    def op(g, *given):
        return mamba_scan(g, *given, batch, HEADS, STATE_SIZE, chunk=chunk)

    def formula(*given):
        return reference.mamba_scan(*given, PACKED, STATE_SIZE)

    inputs = [x, bc, Exact(np.exp(dt - 1))]
    assert_formula(bench, op, formula, inputs, a_log, d, exact=False, sums=2e-5)


@pytest.mark.slow
@pytest.mark.cover(chunk=[32], profile=["texture"])
@pytest.mark.parametrize("profile", ["gpu", "texture"])
@pytest.mark.parametrize("chunk", [16, 32])
def test_packed_samples_in_smaller_chunks(device, chunk, profile):
    compare(device, chunk, groups=2, profile=profile)


@pytest.mark.slow
@pytest.mark.cover(together=[4], profile=["texture"])
@pytest.mark.parametrize("profile", ["gpu", "texture"])
@pytest.mark.parametrize(("together", "groups"), [(1, 2), (2, 2), (4, 1)])
def test_heads_in_blocks(device, monkeypatch, together, groups, profile):
    """Blocks of a group's heads add to the same gradient of B and C, one after the other."""
    pairs, states = 4 * PACKED.size * 16, 8 * 2 * 4 * STATE_SIZE * HEAD_DIM
    monkeypatch.setattr(kernels, "_BLOCK_BYTES", together * max(pairs, states))
    blocks, launched = kernels.blocks, []

    def noted(*given):
        launched.append([block.heads for block in blocks(*given)])
        return blocks(*given)

    for module in (kernels, mamba_chunks):
        monkeypatch.setattr(module, "blocks", noted)
    compare(device, 16, groups, profile)
    assert launched == [[together] * (HEADS // together)] * 2  # forward and backward


def test_chunks_of_a_profile():
    """Software GPUs without textures take shorter ones, whose token pairs cost less."""
    for profile, chunk in (("gpu", 64), ("texture", 64), ("cpu", 32)):
        assert kernels.tokens_of_chunk(PROFILES[profile]) == chunk
