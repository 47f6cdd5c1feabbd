import numpy as np
import pytest
from support.harness import PROFILES, VARIANTS, Bench, assert_close, rounded

from qlora_wgpu.graph.tensor import Storage, vector
from qlora_wgpu.model.weights import _device_arrays
from qlora_wgpu.ops.nf4 import NF4Matrix, pair_values
from qlora_wgpu.quant import quantize_nf4


def on_device(bench, quantized):
    arrays = _device_arrays(quantized)
    tensors = {}
    for name, array in arrays.items():
        data = array if array.dtype == np.float32 else array.view(np.uint32)
        tensors[name] = vector(
            name, data.size, str(data.dtype), Storage(name, "test", data.nbytes, data)
        )
    codebook = None
    if bench.profile.textures and quantized.shape[1] % 32 == 0:
        pairs = pair_values(quantized.quant_map)
        codebook = vector("pairs", 1024, "float32", Storage("", "test", 4096, pairs, texture=True))
    return NF4Matrix(
        "w", *quantized.shape, quantized.blocksize, tensors["codes"], tensors["absmax"],
        tensors["maps"], tensors.get("nested_absmax"), quantized.nested_blocksize,
        codebook,
    )  # fmt: skip


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
