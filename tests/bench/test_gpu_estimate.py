"""What is estimated of kernels: the loop that counts, and what a launch waits for."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ASSEMBLY = """
BB0:
    v_mov_b32_e32 v1, 0
BB1:                                   ; the loop over tiles
    s_cbranch_scc1 BB5
BB2:
    v_fma_f32 v2, v3, v4, v2           ; d6130002
BB3:                                   ; the product
    ds_load_b128 v[4:7], v1
    ds_load_2addr_b32 v[8:9], v1 offset1:32
    v_dual_fmac_f32 v2, v4, v8 :: v_dual_fmac_f32 v3, v5, v9
    v_pk_fma_f16 v2, v3, v4, v2
    v_wmma_f32_16x16x16_f16 v[32:39], v[0:7], v[8:15], v[32:39]
    v_add_nc_u32_e32 v1, 16, v1
    s_cbranch_scc0 BB3
BB4:
    s_branch BB1
BB5:                                   ; the adapter's term
    v_wmma_f32_16x16x16_f16 v[32:39], v[0:7], v[8:15], v[32:39]
    v_fma_f32 v2, v3, v4, v2
    v_fma_f32 v2, v3, v4, v2
    v_fma_f32 v2, v3, v4, v2
    v_fma_f32 v2, v3, v4, v2
    v_fma_f32 v2, v3, v4, v2
    s_cbranch_vccnz BB5
    s_endpgm
"""


@pytest.fixture
def scripts(monkeypatch):
    """The scripts, as a run in their folder finds them."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    import gpu_estimate
    from compilers import loops

    yield SimpleNamespace(estimate=gpu_estimate, loops=loops)
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_the_loop_of_the_product_counts(scripts):
    turn = scripts.loops.main_loop(ASSEMBLY)
    assert turn == scripts.loops.Turn(matrices=1, multiplies=4, others=1, lds_bytes=16 + 8)
    assert turn.flops(32) == 2 * 16**3 + 2 * 32 * 4
    straight = "BB0:\n v_fma_f32 v1, v2, v3, v1\n v_mul_f32 v1, v2, v3\n s_endpgm"
    assert scripts.loops.main_loop(straight) == scripts.loops.Turn(multiplies=1, others=1)


PASSED = """
BB1:
    v_wmma_f32_16x16x16_f16 v[32:39], v[0:7], v[8:15], v[32:39]
    v_add_nc_u32_e32 v1, 16, v1
    s_cbranch_execz BB3
BB2:                                   ; for numbers beyond the end
    {0}
    v_and_b32_e32 v1, 16, v1
    ds_store_b128 v1, v[4:7]
BB3:
    s_cbranch_scc0 BB1
    s_endpgm
"""


@pytest.mark.parametrize(
    ("named", "others"),
    [("v_max_f32_e32 v1, 0xc77fe000, v1", 1), ("v_max_f32_e32 v1, 0x477f0000, v1", 3)],
)
def test_what_hardly_any_turn_gets_to_is_left_out(scripts, named, others):
    turn = scripts.loops.main_loop(PASSED.format(named))
    assert (turn.matrices, turn.others) == (1, others)
    assert turn.lds_bytes == (0 if others == 1 else 16)


PASSED_BY_ALL = """
BB1:
    v_wmma_f32_16x16x16_f16 v[32:39], v[0:7], v[8:15], v[32:39]
    s_cbranch_scc0 BB3
BB2:                                   ; sums are rescaled
    {0}
    v_mul_f32_e32 v1, v2, v1
    s_barrier
BB3:
    s_cbranch_scc0 BB1
    s_endpgm
"""


@pytest.mark.parametrize(
    ("also", "others"),
    [
        ("s_nop 0", 0),
        ("v_wmma_f32_16x16x16_f16 v[32:39], v[0:7], v[8:15], v[32:39]", 1),
        ("v_fma_f32 v1, v2, v3, v1", 1),
    ],
)
def test_a_branch_with_barriers_and_no_products_is_passed_over(scripts, also, others):
    turn = scripts.loops.main_loop(PASSED_BY_ALL.format(also))
    assert turn.others == others
    without = PASSED_BY_ALL.replace("    s_barrier\n", "").format(also)
    assert scripts.loops.main_loop(without).others == 1


def launch_of(workgroups, flops=0, nbytes=0):
    shader = SimpleNamespace(label="k", workgroup_size=(64, 1, 1))
    return SimpleNamespace(workgroups=workgroups, flops=flops, nbytes=nbytes, shader=shader)


@pytest.mark.parametrize(("groups", "filled"), [(100, 1.0), (101, 0.505), (10, 0.1)])
def test_a_launch_waits_for_the_longest(scripts, groups, filled):
    own = scripts.estimate
    card = own.Card(100, 2, 1e9, 32, 128, 1e12)
    outcome = SimpleNamespace(figures={"instructions": 100, "subgroup_size": 64})
    fmas = scripts.loops.Turn(multiplies=90, others=10)
    launch = launch_of((groups, 1, 1), flops=10**12)
    took, bound = own.seconds(card, launch, outcome, fmas)
    most = 2 * 32 * 0.9 * 100 * 2 * 1e9 * filled * own.EFFICIENCY
    assert bound == "loop" and took == pytest.approx(10**12 / most + own.GAP)
    from_memory = scripts.loops.Turn(multiplies=90, lds_bytes=900)  # waits for workgroup memory
    assert own.loop_seconds(card, launch, from_memory, 64) == pytest.approx(
        10**12 / (64 * 2 * 90 / (900 * 64 * 2 / 128) * 2e11 * filled * own.EFFICIENCY)
    )
    took, bound = own.seconds(card, launch_of((groups, 1, 1), 0, 10**9), outcome, fmas)
    assert bound == "bytes" and took == pytest.approx(1e-3 / own.COPIES + own.GAP)
    took, bound = own.seconds(card, launch_of((10**6, 1, 1)), outcome, fmas)
    assert bound == "instructions"
    assert took == pytest.approx(100 * 10**6 * 2 / (2e11 * own.EFFICIENCY) + own.GAP)


def test_matrix_units_take_their_cycles_beside_the_rest(scripts):
    card = scripts.estimate.Card(1, 1, 1.0, 32, math.inf, 1.0)
    launch = launch_of((1, 1, 1), flops=2 * 16**3)
    turn = scripts.loops.Turn(matrices=1, others=8)
    seconds = scripts.estimate.loop_seconds(card, launch, turn, 32)
    assert seconds == pytest.approx(40 / scripts.estimate.EFFICIENCY)
