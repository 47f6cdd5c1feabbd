"""Products with packed weights: those of the weights, with the same bits beside any others."""

import numpy as np
import pytest
from support.harness import DTYPES, PROFILES, VARIANTS, Bench

from qlora_wgpu.graph.graph import GraphError
from qlora_wgpu.graph.tensor import Storage
from qlora_wgpu.kernels.gemm import Gemm
from qlora_wgpu.ops.fusion import FUSIONS
from qlora_wgpu.ops.linear import linear, linear_group
from qlora_wgpu.ops.modules import Linear
from qlora_wgpu.ops.pointwise import glu
from qlora_wgpu.ops.quantized import PackedWeightCache
from qlora_wgpu.selfcheck.cases import new_tokens as cases
from qlora_wgpu.selfcheck.cases.common import arguments_of

TEXTURES = [variant for variant in VARIANTS if "texture" in variant[0]]
CHECKS = (
    cases.check_packed_weights,
    cases.check_packed_weights_of_a_group,
    cases.check_logits_of_packed_weights,
)
CASES = [(check, arguments) for check in CHECKS for arguments in arguments_of(check)] + [
    (cases.check_packed_weights, each)
    for each in (
        ("Q4_1", 96, 2, 0, True, False),
        ("IQ4_NL", 64, 1, 8, True, False),
        ("AWQ", 96, 2, 8, True, False),
        ("LLM.int8", 72, 1, 0, True, False),
        ("FP8", 96, 2, 0, True, True),
    )
]


@pytest.mark.cover(number=range(0, len(CASES), 3))
@pytest.mark.parametrize("number", range(len(CASES)))
def test_all_forms(device, number):
    check, arguments = CASES[number]
    profile, dtype = TEXTURES[number % len(TEXTURES)]
    bench = Bench(device, dtype, PROFILES[profile])
    check(bench, *arguments)
    assert bench.excess <= 1.0
    reads = "few_rows/strips.wgsl" in bench.shaders
    assert reads == (arguments[:1] != ("LLM.int8",))


@pytest.mark.slow
@pytest.mark.cover(arguments=arguments_of(cases.check_glu_of_packed_weights)[::4])
@pytest.mark.parametrize("arguments", arguments_of(cases.check_glu_of_packed_weights))
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_units(device, dtype, arguments):
    bench = Bench(device, dtype, PROFILES["texture"])
    cases.check_glu_of_packed_weights(bench, *arguments)
    assert bench.excess <= 1.0
    assert "few_rows/strips_glu.wgsl" in bench.shaders
    assert not {"glu/forward.wgsl", "few_rows/strips.wgsl"} & bench.shaders


@pytest.mark.slow
@pytest.mark.cover(rows=[3])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_gated_units_have_the_bits_of_two_launches(device, dense, rows):
    x = np.random.default_rng(6).standard_normal((rows, 64))
    stored = [cases.stored_weight("double", 200, 64, n) for n in range(2)]

    def made(rules):
        bench, store = (
            Bench(device, "bfloat16", PROFILES["texture"]),
            PackedWeightCache(dense=dense),
        )
        bench.graph.rules = rules
        matrices = cases.in_one_range(stored, Storage("group", "test", 256))
        store.of_quantized(bench.graph, matrices)
        store.fill(bench.graph)
        layers = [Linear(name, m, None, None) for name, m in zip("ab", matrices, strict=True)]
        batch = cases.reading(rows, store)
        y = glu(bench.graph, *linear_group(bench.graph, bench.operand(x), layers, batch))
        return bench.run_bits(y)[0]

    assert np.array_equal(made(FUSIONS), made(()))


def test_other_profiles_have_none(device):
    bench = Bench(device, "float32", PROFILES["gpu"])
    cases.check_packed_weights(bench, "double", 64, 3, 8, True, False)
    assert bench.excess <= 1.0
    assert not any("strip" in path for path in bench.shaders)


@pytest.mark.slow
@pytest.mark.cover(dense=[False])
@pytest.mark.parametrize("dense", [False, True])
def test_a_row_has_the_same_bits_beside_any_others(device, dense):
    x = np.random.default_rng(3).standard_normal((67, 256))
    stored = cases.stored_weight("double", 264, 256)

    def made(rows):
        bench = Bench(device, "bfloat16", PROFILES[TEXTURES[0][0]])
        (matrix,) = cases.in_one_range([stored], Storage("group", "test", 256))
        store = PackedWeightCache(dense=dense)
        store.of_quantized(bench.graph, [matrix])
        store.fill(bench.graph)
        assert not store.needs_fill
        batch = cases.reading(len(rows), store)
        y = linear(bench.graph, bench.operand(x[rows]), Linear("layer", matrix, None, None), batch)
        return bench.run_bits(y)[0]

    together = made(range(67))
    for rows in ([4], [66, 4], range(3, 11), range(30, 64)):
        assert np.array_equal(made(list(rows)), together[list(rows)]), rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["double", "Q4_K", "FP8"])
def test_new_tokens_multiply_with_the_numbers_of_a_prompt(device, form, dtype):
    """Packed numbers have every rounding that the weights of other forwards have."""
    bench = Bench(device, dtype, PROFILES["texture"])
    (matrix,) = cases.in_one_range(
        [cases.stored_weight(form, 141, 256)], Storage("group", "test", 256)
    )
    rng = np.random.default_rng(5)
    x = bench.operand(rng.standard_normal((3, 256)))
    residual = bench.float32(rng.standard_normal((3, 141)))  # so that results are not rounded
    store = PackedWeightCache()
    store.of_quantized(bench.graph, [matrix])
    store.fill(bench.graph)
    layer = Linear("layer", matrix, None, None)
    new, old = (
        linear(bench.graph, x, layer, batch, residual)
        for batch in (cases.reading(3, store), bench.batch_of(1, 3))
    )
    got, expected = bench.run(new, old)
    assert "few_rows/strips.wgsl" in bench.shaders
    bench.compare(got, expected)
    assert bench.excess <= 1.0


def test_packed_weights_of_experts_are_refused(device):
    bench = Bench(device, "float32", PROFILES[TEXTURES[0][0]])
    w = PackedWeightCache().of_dense(bench.graph, bench.weight(np.zeros((24, 16))))
    x, y = bench.operand(np.zeros((2, 16))), bench.operand(np.zeros((2, 24)))
    Gemm(x, w, y, few=True)
    with pytest.raises(GraphError, match="do not support experts"):
        Gemm(x, w, y, few=True, experts=object())
