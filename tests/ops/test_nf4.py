import numpy as np
import pytest
from support.harness import PROFILES, VARIANTS, Bench, assert_close, rounded

from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.gpu.kernel_config import gpu_profile
from qlora_wgpu.gpu.matrix import MatrixShape
from qlora_wgpu.graph.tensor import Storage, vector
from qlora_wgpu.model.checkpoint_reader import bits_of
from qlora_wgpu.model.quantized_weights import quantized_matrix
from qlora_wgpu.quant import quantize_nf4


def on_device(bench, quantized):
    return quantized_matrix("w", quantized, textures=bench.profile.textures)


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize(
    ("shape", "blocksize"),
    [
        ((3, 5), 64),
        ((37, 20), 32),
        ((50, 130), 64),
        ((300, 64), 64),
        ((16, 72), 128),
        ((21, 96), 64),
    ],
)
def test_dequantize(device, profile, dtype, double_quant, shape, blocksize):
    w = np.random.default_rng(8).standard_normal(shape).astype(np.float32)
    w[0, :2] = 0
    quantized = quantize_nf4(w, blocksize, double_quant)
    bench = Bench(device, dtype, PROFILES[profile])
    ((_, tensor),) = on_device(bench, quantized).shards(bench.graph)
    (got,) = bench.run(tensor)
    # The same float32 product, but for a fused multiply-add in the scale.
    bound = 2e-7 if dtype == "float32" else 2**-8
    assert_close(got, rounded(quantized.dequantize(), dtype), bound, "one fused rounding")


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("columns", [20, 24, 64])  # with half words, whole ones, and whole blocks
def test_shards_meet_without_a_seam(device, profile, columns):
    w = np.random.default_rng(9).standard_normal((83, columns)).astype(np.float32)
    quantized = quantize_nf4(w, 64, True)
    bench = Bench(device, "float32", PROFILES[profile])
    bench.graph.max_binding = 24 * columns * 4 + 600
    shards = list(on_device(bench, quantized).shards(bench.graph))
    assert len(shards) > 2
    assert [row0 for row0, _ in shards] == list(range(0, 83, shards[1][0]))
    got = np.concatenate(bench.run(*(t for _, t in shards)))
    assert_close(got, quantized.dequantize(), 2e-7, "one fused rounding")


def test_weights_beyond_float16_are_held_and_counted(device):
    w = np.random.default_rng(8).standard_normal((9, 64)).astype(np.float32)
    w[2, 5], w[7, 60], w[8] = 7e4, -1e9, 65504.0
    quantized = quantize_nf4(w, 64, False)
    bench = Bench(device, "bfloat16", gpu_profile(MatrixShape(16, 16, 16, 32), device.limits))
    storage = Storage("saturated", "test", 16, np.zeros(4, np.uint32))
    bench.graph.saturated = vector("saturated", 4, "uint32", storage)
    ((_, tensor),) = on_device(bench, quantized).shards(bench.graph)
    assert tensor.dtype == "float16"
    (got,) = bench.run(tensor)
    exact = quantized.dequantize()
    bound = np.maximum(2**-11 * np.abs(exact), 2**-14 * (np.abs(exact) < 2**-14))
    assert (np.abs(got - np.clip(exact, -65504, 65504)) <= 1.001 * bound).all()
    assert np.frombuffer(device.read(storage.buffer, 4), np.uint32) == [2]


def test_stored_weights_beyond_float16_are_refused():
    with pytest.raises(CheckpointError, match=r"lm_head\.weight contains weights .*65,504"):
        bits_of("lm_head.weight", np.full((1, 8), 65536, np.float32), "float16")
