"""Kernels as CUDA: what becomes of matrices, and what is counted of a card's code."""

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

GLSL = """layout(local_size_x = 64, local_size_y = 1, local_size_z = 1) in;
layout(set = 0, binding = 3, std430) buffer _9_7
{
    float _m0[];
} _7;
shared uvec4 _5[64];
void main()
{
    coopmat<float, gl_ScopeSubgroup, 16u, 16u, gl_MatrixUseAccumulator> _1;
    coopmat<float16_t, gl_ScopeSubgroup, 16u, 16u, gl_MatrixUseA> _2;
    coopmat<float16_t, gl_ScopeSubgroup, 16u, 16u, gl_MatrixUseB> _3;
    _1 = coopmat<float, gl_ScopeSubgroup, 16u, 16u, gl_MatrixUseAccumulator>(0.0);
    coopMatLoad(_2, _5, (8u * 5u) + 1u, 5u, gl_CooperativeMatrixLayoutRowMajor);
    coopMatLoad(_3, _5, 0u, 5u, gl_CooperativeMatrixLayoutColumnMajor);
    _1 = coopMatMulAdd(_2, _3, _1, 0);
    coopMatStore(_1, _7._m0, 0u, 64u, gl_CooperativeMatrixLayoutRowMajor);
}
"""
CUDA = """__device__ MatA_0 loadsMatAAt_5row_0(uint at_0, uint stride_0)
{
    MatA_0 m_1;
    (&m_1)->v_1[i_7] = (*&_5_0)[at_0].x;
    return m_1;
}
__device__ MatB_0 loadsMatBAt_5col_0(uint at_1, uint stride_1)
{
    MatB_0 m_2;
    (&m_2)->v_2[i_8] = (*&_5_0)[at_1].x;
    return m_2;
}
__device__ MatC_0 productrowcol_0(MatA_0 * a_0, MatB_0 * b_0, MatC_0 * c_0)
{
    MatC_0 m_3;
    (&m_3)->v_0[i_9] = c_0->v_0[i_9] + float(a_0->v_1[i_9]) * float(b_0->v_2[i_9]);
    return m_3;
}
__device__ void storesMatCAt_7_m0row_0(MatC_0 * m_4, uint at_2, uint stride_2)
{
    *((globalParams_0->_7_0)[at_2]) = m_4->v_0[int(0)] + float(stride_2);
    return;
}
"""
SASS = """
        /*0000*/                   S2R R0, SR_TID.X ;
.L_x_0:
        /*0010*/                   LDS.128 R4, [R0] ;
        /*0020*/               @P1 BRA `(.L_x_1) ;
        /*0030*/                   FMNMX R5, R5, 65504, PT ;
        /*0040*/                   FMNMX R6, R6, 65504, PT ;
.L_x_1:
%s        /*0090*/               @P0 BRA `(.L_x_0) ;
        /*00a0*/                   EXIT ;
""" % ("        /*0050*/                   HMMA.16816.F32 R8, R4, R6, R8 ;\n" * 16)


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def units():
    from cuda.matrices import Units

    return Units()


def test_matrices_become_calls(units):
    code = units.as_functions(GLSL)
    assert "coop" not in code
    assert "_2 = loadsMatAAt_5row((8u * 5u) + 1u, 5u);" in code
    assert "_3 = loadsMatBAt_5col(0u, 5u);" in code
    assert "_1 = productrowcol(_2, _3, _1);" in code
    assert "storesMatCAt_7_m0row(_1, 0u, 64u);" in code


def test_calls_become_instructions(units):
    units.as_functions(GLSL)
    code = units.as_instructions(CUDA)
    assert "wmma.load.a.sync.aligned.row.m16n16k16.shared.f16" in code
    assert "wmma.load.b.sync.aligned.col.m16n16k16.shared.f16" in code
    assert '"r"(stride_0 * 8U)' in code  # of f16 in the array's 16 bytes
    assert "wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32" in code
    assert "wmma.store.d.sync.aligned.row.m16n16k16.global.f32" in code
    assert '"r"(stride_2 * 1U)' in code


def test_a_call_that_slang_dropped_is_told(units):
    units.as_functions(GLSL)
    with pytest.raises(ValueError, match="productrowcol"):
        units.as_instructions(CUDA.replace("productrowcol", "other"))


def test_a_call_that_the_kernel_never_makes_may_be_missing(units):
    store = "    coopMatStore(_1, _7._m0, 0u, 64u, gl_CooperativeMatrixLayoutRowMajor);\n"
    branch = "    if (false)\n    {\n%s    }\n    else\n    {\n        _1 = _1;\n    }\n"
    dead = branch % f"        if (_4)\n        {{\n        {store}        }}\n"
    code = units.as_functions(GLSL.replace(store, dead))
    assert "stores" not in code
    assert code.endswith(branch % "" + "}\n")
    units.as_instructions(CUDA.replace("storesMatCAt", "other"))


EMPTY = """__device__ uint3  WorkgroupCount_0()
{

#line 7835
}
__device__ void nothing_0()
{
}
"""


def test_how_many_workgroups_there_are_is_written_where_slang_left_it_out():
    from gpu_ptxas import completed

    code = completed(EMPTY)
    assert "return make_uint3(gridDim.x, gridDim.y, gridDim.z);\n}" in code
    assert completed(code) == code  # a procedure may be empty, and a whole function stays


def test_another_function_that_slang_left_empty_is_told():
    from gpu_ptxas import Failure, completed

    with pytest.raises(Failure, match="left WorkgroupSize empty"):
        completed(EMPTY.replace("Count", "Size"))


def test_what_a_branch_passes_over_is_no_part_of_a_turn():
    from cuda.sass import loops

    instructions, (loop,) = loops(SASS)
    assert instructions == 23
    assert (loop.instructions, loop.passed) == (19, 2)
    assert loop.counts["HMMA"] == 16


def test_a_turn_is_what_the_estimate_takes():
    from cuda.sass import loops, main_turn

    turn = main_turn(loops(SASS)[1])
    # Two instructions of matrix units are a product; the others are a load and two branches.
    assert (turn.matrices, turn.multiplies, turn.others, turn.lds_bytes) == (8, 0, 3, 16)


MASKED = """
.L_x_0:
        /*0000*/                   LDG.E.128 R4, [R0] ;
{0}        /*0060*/               @P2 BRA `(.L_x_1) ;
        /*0070*/                   MUFU.EX2 R5, R5 ;
        /*0080*/                   FSEL R5, R5, RZ, P0 ;
        /*0090*/                   BRA `(.L_x_3) ;
.L_x_1:
        /*00a0*/                   MUFU.EX2 R5, R5 ;
.L_x_3:
{0}        /*00f0*/               @P0 BRA `(.L_x_0) ;
        /*0100*/                   EXIT ;
""".format("        /*0010*/                   HMMA.16816.F32 R8, R4, R6, R8 ;\n" * 8)


def test_a_turn_passes_masks_over():
    from cuda.sass import loops, main_turn

    _, (loop,) = loops(MASKED)
    assert loop.instructions == 1 + 8 + 1 + 1 + 8 + 1  # without the mask
    turn = main_turn([loop])
    assert turn.matrices == 8 and turn.flops(32) == 8 * 2 * 16**3


def test_a_branch_with_barriers_is_passed_over_though_it_takes_exponents():
    from cuda.sass import loops

    ways = (
        "        /*0060*/               @P2 BRA `(.L_x_2) ;\n"
        "        /*0070*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;\n"
        "        /*0080*/                   MUFU.EX2 R5, R5 ;\n.L_x_2:\n"
    )
    product = "        /*0010*/                   HMMA.16816.F32 R8, R4, R6, R8 ;\n"
    end = "        /*00f0*/               @P0 BRA `(.L_x_0) ;\n"
    _, (loop,) = loops(f".L_x_0:\n{product * 8}{ways}{end}")
    assert (loop.instructions, loop.passed) == (8 + 1 + 1, 2)


def test_what_is_atomic_alone_stays_in_the_kernel():
    from gpu_ptxas import prepared

    code = prepared(
        "shared uint _4;\nshared uint _5[2];\nvoid main()\n{\n"
        "    atomicExchange(_5[_7], _8._m0 + 1u);\n    uint _9 = atomicAdd(_4, 0u);\n}\n"
    )
    assert "_4 = 0u;" in code and "_5[1u] = 0u;" in code
    assert "_5[_7] = _8._m0 + 1u;" in code and "uint _9 = _4;" in code


def test_values_of_other_lanes_stay_in_the_kernel(units):
    from gpu_ptxas import _SUBGROUPS

    store = "    coopMatStore("
    code = units.as_functions(
        GLSL.replace(store, f"    _4 = subgroupShuffleXor(max(_4, _5), 2u);\n{store}")
    )
    assert "_4 = shuffledXor(max(_4, _5), 2u);" in code and not _SUBGROUPS.search(code)
    function = "__device__ float shuffledXor_0(float x_0, uint mask_0)\n{\n    return x_0;\n}\n"
    code = units.as_instructions(CUDA + function)
    assert code.endswith("{\nreturn __shfl_xor_sync(0xffffffffU, x_0, mask_0);\n}\n")
    with pytest.raises(ValueError, match="shuffledXor"):
        units.as_instructions(CUDA)


@pytest.mark.parametrize(
    ("threads", "registers", "nbytes", "count"),
    [
        (256, 128, 0, 2), (256, 129, 0, 1), (128, 255, 0, 2),  # 65,536 registers
        (1024, 32, 0, 2), (64, 24, 0, 32), (32, 24, 0, 32),  # 2,048 threads, 32 workgroups
        (128, 64, 38_000, 5), (128, 64, 49_152, 4),  # 228 KiB, one each for the system
    ],
)  # fmt: skip
def test_how_many_workgroups_a_multiprocessor_has(threads, registers, nbytes, count):
    from explore_ptxas import workgroups

    assert workgroups(threads, registers, nbytes, "sm_90") == count


@pytest.mark.full
def test_kernels_of_the_explorers_are_looked_at_in_turns():
    from explore_ptxas import kernels

    names = [name for name, _ in kernels(["product", "attention"])]
    assert [name.split()[0] for name in names[:6]] == ["product", "attention", "attention"] * 2
    assert len(set(names)) == len(names) > 1000
    assert not any(name.startswith("product") for name, _ in kernels(["attention"]))
