"""Products of few rows: those of the dequantized weights, with the same bits beside any others."""

import numpy as np
import pytest
from support.harness import PROFILES, VARIANTS, Bench

from qlora_wgpu.gpu.kernel_config import gpu_profile
from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Storage
from qlora_wgpu.kernels.gemm import GEMM, Gemm
from qlora_wgpu.kernels.lora import Lora
from qlora_wgpu.ops.linear import linear, readable
from qlora_wgpu.ops.modules import DenseMatrix, Linear
from qlora_wgpu.ops.norms import rms_norm
from qlora_wgpu.selfcheck.cases import new_tokens as cases
from qlora_wgpu.selfcheck.cases.common import arguments_of

CASES = [
    (cases.check_few_rows, each)
    for each in (
        *arguments_of(cases.check_few_rows),
        ("Q4_1", 96, 2, 0, "operand", False),
        ("Q4_K", 256, 1, 3, "residual", True),
        ("Q6_K", 256, 1, 8, "operand", False),
        ("IQ4_NL", 64, 2, 0, "operand", False),
        ("MXFP4", 96, 1, 8, "operand", False),
        ("NVFP4", 48, 1, 0, "residual", True),
        ("Q8_0", 96, 3, 0, "operand", False),
        ("LLM.int8", 20, 2, 4, "operand", False),
        ("FP8", 40, 1, 0, "operand", False),
        ("GPTQ", 72, 1, 8, "operand", False),
        ("GPTQ of groups that end in a row", 96, 1, 0, "operand", False),
        ("INT4 with zeros", 96, 2, 8, "residual", True),
        ("INT8 with zeros", 72, 1, 0, "operand", False),
        ("dense", 1200, 2, 0, "operand", False),
    )
] + [
    (cases.check_few_rows_of_a_group, each)
    for each in (
        ("Q6_K", 256, 3, 8, False, (False, True)),
        ("AWQ", 96, 3, 8, True, (False, True, False)),
    )
]

BY_UNIT = {
    "few registers": gpu_profile(None, few_registers=True),
    "loads held back": gpu_profile(None, hoists_loads=True),
}


@pytest.mark.cover(number=range(0, len(CASES), 3))
@pytest.mark.parametrize("number", range(len(CASES)))
def test_all_forms(device, number):
    """On every kind of profile and in both types in turn."""
    check, arguments = CASES[number]
    profile, dtype = VARIANTS[number % len(VARIANTS)]
    bench = Bench(device, dtype, PROFILES[profile])
    check(bench, *arguments)
    assert bench.excess <= 1.0
    assert not any(path.startswith("dequantize/") for path in bench.shaders) or arguments[1] % 8


@pytest.mark.cover(number=range(1, len(CASES), 8))
@pytest.mark.parametrize("number", range(len(CASES)))
def test_all_forms_a_unit_after_the_other(device, number):
    check, arguments = CASES[number]
    bench = Bench(device, "bfloat16", BY_UNIT["loads held back"])
    check(bench, *arguments)
    assert bench.excess <= 1.0


def test_units_follow_each_other_where_registers_are_few():
    """Told by the shaders: from one row on, from four on, and never."""
    profiles = {"gpu": PROFILES["gpu"], **BY_UNIT}
    found = {
        name: [rows for rows in (1, 2, 4, 8) if "UNIT_BY_UNIT=True" in product(profile, rows)]
        for name, profile in profiles.items()
    }
    assert found == {"gpu": [], "few registers": [4, 8], "loads held back": [1, 2, 4, 8]}


def product(profile, rows):
    """The label of the shader of a product with a quantized matrix."""
    g = Graph("bfloat16", profile)
    weights = cases.stored_weight("double", 72, 256)
    (matrix,) = cases.in_one_range([weights], Storage("group", "test", 256))
    layer = Linear("layer", matrix, None, None)
    linear(g, g.operand("x", rows, 256), layer, cases.new_tokens(rows))
    (launch,) = g.launches
    return launch.shader.label


@pytest.mark.parametrize("profile", PROFILES)
def test_logits_of_a_prompt(device, profile):
    bench = Bench(device, "bfloat16", PROFILES[profile])
    cases.check_logits_of_a_prompt(bench)
    assert bench.excess <= 1.0


@pytest.mark.slow
@pytest.mark.cover(form=["double"], profile=["texture"])
@pytest.mark.parametrize("form", ["double", "Q6_K", "dense"])
@pytest.mark.parametrize("profile", [*PROFILES, *BY_UNIT])
def test_a_row_has_the_same_bits_beside_any_others(device, profile, form):
    random = np.random.default_rng(3)
    x = random.standard_normal((19, 256))
    a, b = random.standard_normal((4, 256)), random.standard_normal((72, 4))
    zeros = np.zeros_like(a), np.zeros_like(b)
    weights = cases.stored_weight("double" if form == "dense" else form, 72, 256)

    def made(rows):
        bench = Bench(device, "bfloat16", {**PROFILES, **BY_UNIT}[profile])
        (matrix,) = cases.in_one_range([weights], Storage("group", "test", 256))
        if form == "dense":
            matrix = DenseMatrix(72, 256, ((0, bench.weight(weights.dequantize())),))
        lora = Lora(4, 0.5, 0.3, 0, *map(bench.given, (a, b, *zeros)))
        layer = Linear("layer", matrix, None, lora)
        y = linear(bench.graph, bench.operand(x[rows]), layer, cases.new_tokens(len(rows)))
        return bench.run_bits(y)[0]

    together = made(range(19))
    for rows in ([4], [18, 4], range(3, 11), range(2, 19)):
        assert np.array_equal(made(list(rows)), together[list(rows)]), rows


@pytest.mark.parametrize("arguments", arguments_of(cases.check_norm_and_down))
@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
def test_a_norm_and_the_adapters_first_half(device, profile, dtype, arguments):
    bench = Bench(device, dtype, PROFILES[profile])
    cases.check_norm_and_down(bench, *arguments)
    assert bench.excess <= 1.0
    alone = "rms_norm/forward.wgsl" in bench.shaders
    assert alone is (profile == "cpu")


@pytest.mark.parametrize("profile", ["texture", "gpu"])
def test_a_norm_and_the_adapters_first_half_have_the_bits_of_either(device, profile):
    """However many rows there are."""
    random = np.random.default_rng(4)
    x, weight = random.standard_normal((19, 1100)), 1 + random.standard_normal(1100)
    a = random.standard_normal((13, 1100))

    def made(rows, *, apart):
        bench = Bench(device, "bfloat16", PROFILES[profile])
        g = bench.graph
        y = rms_norm(g, bench.float32(x[rows]), bench.float32(weight), 1e-5)
        u = g.float32("u", len(rows), len(a))
        label = "" if apart else "lora/down"
        product = Gemm(y, bench.float32(a), u, scale=0.5, few=True, label=label)
        GEMM.launch(g, product)
        made = bench.run_bits(y, u)
        assert ("rms_norm/forward.wgsl" in bench.shaders) is apart
        return made

    every = list(range(19))
    for rows in (every, [3], [1, 4], list(range(2, 18))):
        for got, exact in zip(made(rows, apart=False), made(every, apart=True), strict=True):
            assert np.array_equal(got, exact[rows])


def test_matrices_in_several_places_are_dequantized_first(device):
    bench = Bench(device, "float32", PROFILES["gpu"])
    stored = [cases.stored_weight("NF4", 24, 64, n) for n in range(2)]
    apart = [cases.in_one_range([each], Storage("group", "test", 256))[0] for each in stored]
    assert readable(bench.graph, apart) is None
    together = cases.in_one_range(stored, Storage("group", "test", 256))
    assert readable(bench.graph, together) is not None


def test_shapes_that_do_not_fit_are_refused(device):
    bench = Bench(device, "float32", PROFILES["gpu"])
    x, w, y = (bench.operand(np.zeros(shape)) for shape in ((2, 16), (24, 16), (2, 24)))
    narrow = bench.operand(np.zeros((2, 8)))
    Gemm(x, w, y, few=True)
    with pytest.raises(GraphError, match="do not fit"):
        Gemm(narrow, w, y, few=True)
    for first, *others in ((narrow, narrow), (x, narrow, y)):
        with pytest.raises(GraphError, match="not the layers"):
            Gemm(x, w, first, others=tuple(others), few=True)
    with pytest.raises(GraphError, match="not the layers"):
        Gemm(x, w, x, others=(narrow,), few=True, residual=y)
