"""Dequantization through workgroup memory: the very bits of the kernel that takes unit by unit."""

from dataclasses import replace

import numpy as np
import pytest
from support.harness import Bench

from qlora_wgpu.gpu.kernel_config import CPU_PROFILE, GPU_PROFILE, cpu_profile, gpu_profile
from qlora_wgpu.gpu.matrix import MatrixShape
from qlora_wgpu.graph.tensor import Storage, vector
from qlora_wgpu.kernels.dequantize import shares_scales
from qlora_wgpu.model.quantized_weights import device_arrays, lay_out, quantized_matrix, words
from qlora_wgpu.ops.quantized import dequantize_together
from qlora_wgpu.quant import quantize_nf4
from qlora_wgpu.quant.safetensors_formats import MXFP4, NVFP4, byte_format, group_format
from qlora_wgpu.selfcheck.cases.formats import FORMS, random_weight

UNITS = replace(GPU_PROFILE, gemm_kind="register")
SHARED = "dequantize/forward_shared.wgsl"
TILE = 8 * 8 * GPU_PROFILE.flat_group  # weights of a workgroup


def paths(bench):
    return {launch.path for launch in bench.graph.launches}


def both(device, dtype, make):
    """What ``make`` launches, by the kernel of tiles and unit by unit."""
    results = []
    for profile, path in ((GPU_PROFILE, SHARED), (UNITS, "dequantize/forward.wgsl")):
        bench = Bench(device, dtype, profile)
        tensors = make(bench)
        assert paths(bench) == {path}
        results.append(bench.run(*tensors))
    return zip(*results, strict=True)


def assert_same(device, dtype, make):
    for got, expected in both(device, dtype, make):
        assert np.array_equal(got, expected) and np.abs(expected).max() > 0


@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize(
    ("shape", "blocksize"),
    [
        ((64, 64), 64),  # one tile
        ((65, 64), 64),  # and one block more
        ((203, 24), 64),  # blocks cross rows, and the last is not whole
        ((157, 72), 32),  # 128 blocks a tile
        ((70, 136), 128),
        ((37, 264), 256),
        ((9, 1096), 512),
        ((33, 520), 4096),
    ],
)
def test_nf4(device, shape, blocksize, double_quant):
    w = np.random.default_rng(8).standard_normal(shape).astype(np.float32)
    quantized = quantize_nf4(w * np.exp(w[:, :1]), blocksize, double_quant)

    def make(bench):
        return [t for _, t in quantized_matrix("w", quantized, textures=False).shards(bench.graph)]

    assert_same(device, "bfloat16" if double_quant else "float32", make)


@pytest.mark.parametrize("blocksize", [32, 64, 128, 4096])
def test_shards_that_begin_within_a_block(device, blocksize):
    """32 rows of 200 weights at a time: no shard but the first begins where a large block does."""
    w = np.random.default_rng(8).standard_normal((101, 200)).astype(np.float32)
    quantized = quantize_nf4(w * np.exp(w[:, :1]), blocksize, True)

    def make(bench):
        bench.graph.max_binding = 32 * 4 * 200
        shards = list(quantized_matrix("w", quantized, textures=False).shards(bench.graph))
        assert [row0 for row0, _ in shards] == [0, 32, 64, 96]
        return [tensor for _, tensor in shards]

    assert_same(device, "float32", make)


_NAMES = ("Q4_1", "Q4_K", "Q6_K", "IQ4_NL", "Q8_0", "AWQ", "INT4 with zeros")
FORMATS = {
    **{name: FORMS[name] for name in _NAMES},
    "MXFP4": MXFP4,
    "NVFP4": NVFP4,
    "GPTQ in blocks of eight": group_format("GPTQ", 4, 264, 8),
    "INT8 with zeros": byte_format((1, 264), 264, has_zeros=True),
}


@pytest.mark.quick("values")
@pytest.mark.parametrize("name", FORMATS)
def test_formats(device, name):
    """To the bit what they stand for, too: their products are exact, or rounded once."""
    form = FORMATS[name]
    stored = random_weight(form, (41, 256 if form.blocksize == 256 else 264))

    def make(bench):
        return [t for _, t in quantized_matrix("w", stored, textures=False).shards(bench.graph)]

    ((got, expected),) = both(device, "float32", make)
    assert np.array_equal(got, expected) and np.array_equal(got, stored.dequantize())


@pytest.mark.parametrize("rows", [(130, 65, 97), (57, 58), (114, 8, 57), (9,)])
@pytest.mark.parametrize("double_quant", [False, True])
def test_matrices_of_one_input(device, rows, double_quant):
    """57 rows of 72 weights are a unit more than a tile."""
    rng = np.random.default_rng(8)
    stored = [
        quantize_nf4(rng.standard_normal((n, 72)).astype(np.float32), 64, double_quant)
        for n in rows
    ]

    def make(bench):
        whole, matrices = Storage("group", "test", 256), []
        for weight in stored:
            matrix, storages = lay_out("w", weight.shape, weight.format, 1, whole.part, None)
            arrays = device_arrays(weight)
            for leaf, storage in storages.items():
                storage.data = words(arrays[leaf])
            matrices.append(matrix)
        w = bench.graph.weight("w", sum(rows), 72)
        dequantize_together(bench.graph, w, matrices)
        return [w]

    assert_same(device, "bfloat16", make)


@pytest.mark.parametrize("double_quant", [False, True])
def test_matrices_among_others(device, double_quant):
    """Parts that lie apart: each is written behind the one before, or before the one behind."""
    rng = np.random.default_rng(8)
    stored = [
        quantize_nf4(rng.standard_normal((n, 72)).astype(np.float32), 64, double_quant)
        for n in (60, 117)
    ]

    def make(bench):
        w = bench.graph.weight("w", 177, 72)
        matrices = [quantized_matrix(f"{i}", each, textures=False) for i, each in enumerate(stored)]
        other = bench.graph.weight("w", 177, 72)
        dequantize_together(bench.graph, w, matrices)
        matrices[1].put_rows(bench.graph, other, 60)
        matrices[0].put_rows(bench.graph, other, 0)  # its last tile ends where the other begins
        return [w, other]

    (w, by_units), (other, _) = both(device, "float32", make)
    assert np.array_equal(w, by_units) and np.array_equal(w, other) and np.abs(w).max() > 0


NOT_FINITE = [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7FC00000, 0x7F800000, 0xFF800000]
LARGE = np.array([32768, 65504, 65536, -1e6, 3e38, np.inf, np.nan], np.float32).view(np.uint32)


def with_scales(bits, place):
    """NF4 in blocks of 64, a tile for each of these scales: at a place in it, ones elsewhere."""
    w = np.random.default_rng(8).standard_normal((64 * len(bits), 64)).astype(np.float32)
    scales = np.ones(len(w), np.float32)
    scales.view(np.uint32)[place::64] = bits
    assert TILE == 64 * 64
    return replace(quantize_nf4(w, 64, False), absmax=scales)


@pytest.mark.parametrize("place", [0, 41, 63])
def test_scales_that_are_not_finite(device, place):
    """bfloat16 of NaN is NaN, whatever its bits: NVIDIA's would be rounded to -0."""
    stored = with_scales(NOT_FINITE, place)
    bench = Bench(device, "bfloat16", GPU_PROFILE)
    ((_, tensor),) = quantized_matrix("w", stored, textures=False).shards(bench.graph)
    assert paths(bench) == {SHARED}
    (got,) = bench.run(tensor)
    with np.errstate(invalid="ignore"):
        exact = stored.dequantize()
    assert np.array_equal(np.isnan(got), np.isnan(exact))
    assert np.array_equal(np.isinf(got), np.isinf(exact))


@pytest.mark.parametrize("place", [0, 41, 63])
def test_weights_beyond_float16_are_held_and_counted_in_whole_tiles(device, place):
    stored = with_scales(LARGE, place)
    bench = Bench(device, "bfloat16", gpu_profile(MatrixShape(16, 16, 16, 32), device.limits))
    counts = Storage("saturated", "test", 16, np.zeros(4, np.uint32))
    bench.graph.saturated = vector("saturated", 4, "uint32", counts)
    ((_, tensor),) = quantized_matrix("w", stored, textures=False).shards(bench.graph)
    assert tensor.dtype == "float16" and paths(bench) == {SHARED}
    (got,) = bench.run(tensor)
    with np.errstate(invalid="ignore"):
        exact = stored.dequantize().astype(np.float64)
    finite = np.isfinite(exact)
    assert np.array_equal(got[~finite], exact[~finite], equal_nan=True)
    got, exact = got[finite], exact[finite]
    held = np.clip(exact, -65504, 65504)
    assert (np.abs(got - held) <= np.maximum(1.001 * 2**-11 * np.abs(held), 2**-25)).all()
    beyond = (np.abs(exact) > 65504).sum()
    assert np.frombuffer(device.read(counts.buffer, 4), np.uint32) == [beyond] and beyond


def test_kernels_ask_for_workgroup_memory_where_gpus_have_it():
    """Software GPUs, and GPUs whose drivers get such memory wrong, take unit by unit."""
    form = quantize_nf4(np.ones((8, 64), np.float32), 64, True).format
    assert shares_scales(form, 64, GPU_PROFILE)
    for profile in (CPU_PROFILE, cpu_profile(8), UNITS):
        assert not shares_scales(form, 64, profile)
    assert not shares_scales(form, 60, GPU_PROFILE)  # units that cross rows
    assert not shares_scales(FORMS["LLM.int8"], 64, GPU_PROFILE)  # scales of tiles
    assert not shares_scales(replace(FORMS["FP8"], block_rows=None), 64, GPU_PROFILE)  # NaN
    assert shares_scales(replace(FORMS["Q8_0"], block_rows=None), 64, GPU_PROFILE)
