"""NF4 against what bitsandbytes recorded (tests/fixtures/record_nf4.py), bit for bit."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from qlora_wgpu.errors import CheckpointError, ConfigError, ShapeError
from qlora_wgpu.quant import (
    BLOCKSIZES,
    NF4_QUANT_MAP,
    QuantizedWeight,
    dynamic_quant_map,
    quantize_nf4,
)
from qlora_wgpu.quant.quantized_weight import float32_mean, nearest_codes

RECORD = np.load(Path(__file__).parents[1] / "fixtures" / "nf4.npz")
CASES = sorted({name.split("/")[0] for name in RECORD.files if "/" in name})


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.tobytes() == expected.tobytes()


def hashed(n: int) -> np.ndarray:
    """As in record_nf4.py."""
    bits = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(2654435761) >> np.uint64(8)
    return ((bits & np.uint64(0xFFFFFF)).astype(np.float32) + np.float32(0.5)) / np.float32(2**24)


def reference_dequantize(tensor: QuantizedWeight) -> np.ndarray:
    """One weight at a time, straight from the definition of the layout."""
    n = tensor.shape[0] * tensor.shape[1]
    result = np.empty(n, np.float32)
    for i in range(n):
        byte = int(tensor.codes[i // 2])
        code = byte >> 4 if i % 2 == 0 else byte & 15
        block = i // tensor.format.blocksize
        scale = tensor.absmax[block]
        if tensor.nested_absmax is not None and tensor.nested_quant_map is not None:
            nested = tensor.nested_absmax[block // tensor.format.nested_blocksize]
            scale = tensor.nested_quant_map[scale] * nested + np.float32(tensor.nested_offset)
        result[i] = tensor.format.quant_map[code] * scale
    return result.reshape(tensor.shape)


def test_the_record_holds_every_kind_of_matrix() -> None:
    assert len(CASES) == 24
    assert {"ties", "zeros_short", "odd", "denormals", "two_nested_blocks", "edges_short"} <= set(
        CASES
    )


def test_codebooks_have_the_bits_of_bitsandbytes() -> None:
    assert_same_bits(NF4_QUANT_MAP, RECORD["quant_map"])
    assert_same_bits(dynamic_quant_map(), RECORD["dynamic_quant_map"])


def test_codebooks_cannot_be_changed_by_accident() -> None:
    for codebook in (NF4_QUANT_MAP, dynamic_quant_map()):
        with pytest.raises(ValueError, match="read-only"):
            codebook[0] = 0


@pytest.mark.parametrize("case", CASES)
def test_single_quantization_is_bit_exact(case: str) -> None:
    weight, blocksize = RECORD[f"{case}/weight"], int(RECORD[f"{case}/blocksize"])
    tensor = quantize_nf4(weight, blocksize, double_quant=False)
    assert_same_bits(tensor.codes, RECORD[f"{case}/codes"])
    assert_same_bits(tensor.absmax, RECORD[f"{case}/absmax"])
    assert_same_bits(tensor.format.quant_map, RECORD["quant_map"])
    assert tensor.nested_absmax is None
    assert tensor.nested_absmax is None
    assert tensor.nested_quant_map is None


@pytest.mark.parametrize("case", CASES)
def test_double_quantization_is_bit_exact(case: str) -> None:
    weight, blocksize = RECORD[f"{case}/weight"], int(RECORD[f"{case}/blocksize"])
    tensor = quantize_nf4(weight, blocksize, double_quant=True)
    assert_same_bits(tensor.codes, RECORD[f"{case}/codes"])
    assert_same_bits(tensor.absmax, RECORD[f"{case}/absmax_codes"])
    assert tensor.nested_absmax is not None
    assert tensor.nested_quant_map is not None
    assert_same_bits(tensor.nested_absmax, RECORD[f"{case}/nested_absmax"])
    assert_same_bits(tensor.nested_quant_map, RECORD["dynamic_quant_map"])
    assert_same_bits(np.float32(tensor.nested_offset)[None], RECORD[f"{case}/nested_offset"][None])
    assert isinstance(tensor.nested_offset, float)
    assert tensor.nested_offset == np.float32(tensor.nested_offset)
    assert tensor.format.nested_blocksize == 256


@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_dequantization_follows_the_definition(case: str, double_quant: bool) -> None:
    weight, blocksize = RECORD[f"{case}/weight"], int(RECORD[f"{case}/blocksize"])
    tensor = quantize_nf4(weight, blocksize, double_quant)
    result = tensor.dequantize()
    assert result.shape == weight.shape
    assert_same_bits(result, reference_dequantize(tensor))


def test_dequantization_in_several_chunks() -> None:
    weight = np.random.default_rng(0).standard_normal((301, 1001)).astype(np.float32)
    tensor = quantize_nf4(weight)
    values = NF4_QUANT_MAP[np.stack([tensor.codes >> 4, tensor.codes & 15], 1).reshape(-1)]
    scales = np.repeat(tensor.block_scales(), 64)[: weight.size]
    assert_same_bits(tensor.dequantize().reshape(-1), values[: weight.size] * scales)


def test_all_codes_dequantize_to_their_own_code() -> None:
    """Every code in either nibble survives a round trip."""
    high, low = np.meshgrid(np.arange(16), np.arange(16), indexing="ij")
    weight = np.ones((256, 32), np.float32)
    weight[:, :2] = NF4_QUANT_MAP[np.stack([high, low], -1).reshape(256, 2)]
    tensor = quantize_nf4(weight, 32, double_quant=False)
    first = tensor.codes.reshape(256, 16)[:, 0]
    assert_same_bits(first, np.arange(256, dtype=np.uint8))
    assert_same_bits(tensor.dequantize(), weight)


@pytest.mark.parametrize("blocksize", BLOCKSIZES)
def test_every_blocksize(blocksize: int) -> None:
    weight = np.random.default_rng(1).standard_normal((67, 131)).astype(np.float32)
    tensor = quantize_nf4(weight, blocksize, double_quant=False)
    blocks = [weight.reshape(-1)[i : i + blocksize] for i in range(0, weight.size, blocksize)]
    assert_same_bits(tensor.absmax, np.array([np.abs(b).max() for b in blocks], np.float32))
    # The widest gap between two codes is 0.3039, so no weight is off by more than half of it.
    error = np.abs(tensor.dequantize() - weight).reshape(-1)
    allowed = np.repeat(tensor.absmax, blocksize)[: weight.size] * np.float32(0.1520)
    assert (error <= allowed).all()


def test_mean_error_on_normal_weights_is_that_of_bitsandbytes() -> None:
    """bitsandbytes' own tests expect 0.072798 with a standard deviation of 0.000074 (block 64)."""
    weight = np.random.default_rng(2).standard_normal((1024, 1024)).astype(np.float32)
    error = np.abs(quantize_nf4(weight, 64, double_quant=False).dequantize() - weight).mean()
    assert abs(float(error) - 0.072798) < 7 * 0.000074


def test_a_tie_gets_the_lower_code() -> None:
    bounds = (NF4_QUANT_MAP[:-1] + NF4_QUANT_MAP[1:]) / np.float32(2)
    weight = np.zeros((1, 32), np.float32)
    weight[0, 0] = 1
    weight[0, 1:16] = bounds
    codes = quantize_nf4(weight, 32, double_quant=False).codes
    assert np.stack([codes >> 4, codes & 15], 1).reshape(-1)[1:16].tolist() == list(range(15))


def test_a_non_contiguous_matrix_is_read_in_its_logical_order() -> None:
    weight = np.random.default_rng(3).standard_normal((96, 64)).astype(np.float32)
    tensor = quantize_nf4(weight.T)
    assert tensor.shape == (64, 96)
    assert_same_bits(tensor.codes, quantize_nf4(weight.T.copy()).codes)


def test_the_weight_itself_is_left_alone() -> None:
    weight = np.random.default_rng(4).standard_normal((40, 50)).astype(np.float32)
    before = weight.copy()
    weight.flags.writeable = False
    quantize_nf4(weight)
    assert_same_bits(weight, before)


def test_dtype_is_noted_and_nothing_else_changes() -> None:
    weight = np.ones((2, 64), np.float32)
    assert quantize_nf4(weight).dtype == "float32"
    tensor = quantize_nf4(weight, dtype="bfloat16")
    assert tensor.dtype == "bfloat16"
    assert_same_bits(tensor.dequantize(), weight)


def test_nbytes_counts_every_array() -> None:
    weight = np.ones((64, 96), np.float32)  # 6144 weights, 96 blocks
    assert quantize_nf4(weight, 64, double_quant=False).nbytes == 3072 + 64 + 96 * 4
    assert quantize_nf4(weight, 64).nbytes == 3072 + 64 + 96 + 4 + 1024


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 70, 99])  # a whole block, and the short last one
def test_weights_that_are_not_finite_are_refused(bad: float, place: int) -> None:
    weight = np.ones((1, 100), np.float32)
    weight[0, place] = bad
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        quantize_nf4(weight)


def test_scales_that_overflow_their_mean_are_refused_only_if_doubly_quantized() -> None:
    weight = np.full((4, 64), 3e38, np.float32)
    with pytest.raises(CheckpointError, match=r"too large .* quant\.double_quant"):
        quantize_nf4(weight)
    assert_same_bits(quantize_nf4(weight, double_quant=False).dequantize(), weight)


@pytest.mark.parametrize("blocksize", [0, -64, 1, 48, 63, 8192])
def test_block_sizes_that_bitsandbytes_lacks_are_refused(blocksize: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"blocksize must be one of 32, 64, 128.*, got {blocksize}"
    ):
        quantize_nf4(np.ones((4, 64), np.float32), blocksize)


@pytest.mark.parametrize(
    "weight",
    [np.ones(64, np.float32), np.ones((2, 64)), np.ones((0, 64), np.float32), np.ones((2, 2, 2))],
    ids=["vector", "float64", "empty", "three dimensions"],
)
def test_only_float32_matrices_are_accepted(weight: np.ndarray) -> None:
    with pytest.raises(ShapeError, match="requires a float32 matrix"):
        quantize_nf4(weight)


@pytest.mark.parametrize("index", range(len(RECORD["mean_sizes"])))
def test_the_mean_has_the_bits_of_pytorch(index: int) -> None:
    values = hashed(int(RECORD["mean_sizes"][index]))
    assert float32_mean(values) == RECORD["means"][index]


def test_8_bit_codes_change_where_bitsandbytes_changes_them() -> None:
    """Both float32 neighbours of each of the 255 edges."""
    assert_same_bits(nearest_codes(RECORD["edges"]), RECORD["edge_codes"])


def test_8_bit_codes_of_what_is_no_number_in_range() -> None:
    values = np.array([np.nan, -np.inf, np.inf, -1.5, 1.5], np.float32)
    assert nearest_codes(values).tolist() == [0, 0, 255, 0, 255]


def test_temporary_memory_is_bounded() -> None:
    """Beyond the result, a few chunks of 65,536 weights: not another copy of the matrix."""
    weight = np.random.default_rng(5).standard_normal((2048, 2048)).astype(np.float32)  # 16 MiB
    quantize_nf4(weight[:64])  # caches filled
    tracemalloc.start()
    tensor = quantize_nf4(weight)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    result = tensor.dequantize()
    peak_back = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < tensor.nbytes + 3 * 2**20
    assert peak_back < tensor.nbytes + result.nbytes + 3 * 2**20


def test_the_mean_of_as_many_values_as_there_are_lanes_is_of_their_sum_in_order() -> None:
    values = np.array([2.0**24, *[1.0] * 7], np.float32)
    assert float32_mean(values) == 2.0**21
