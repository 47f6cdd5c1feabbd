"""Every way of reading and writing an operand, and NaN, Inf and subnormals through each of them."""

import numpy as np
import pytest
from support.harness import DTYPES, PROFILES, Bench

from qlora_wgpu.bfloat16 import from_bfloat16, to_bfloat16
from qlora_wgpu.gpu import wgsl
from qlora_wgpu.graph.tensor import Storage, matrix, stored_bits, stored_floats
from qlora_wgpu.ops.tensor import converted

ROWS, COLUMNS = 9, 48
SPECIAL = np.array(
    [
        0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001, 0x7FC00000,  # NaN: NVIDIA's, signalling
        0x7F800000, 0xFF800000,  # Inf
        0x7F7FFFFF, 0xFF7FFFFF,  # the largest finite: rounds to Inf
        0x7F7F7FFF, 0x7F7F8000,  # the largest that does not, a tie that does
        0x00000001, 0x80000001, 0x007FFFFF, 0x00018000, 0x00008000,  # subnormals
        0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x00000000, 0x80000000,  # ties
    ],
    np.uint32,
)  # fmt: skip

SHADER = """
//#include common/flat.wgsl

struct Params {
    units: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: READ MEMORY_X
//#output 2 y: WRITE MEMORY_Y

fn each(i: u32) {
    if (i < params.units) {
        BODY
    }
}
"""
BODIES = {
    ("8", "8"): "store_y(i, load_x(i));",
    ("4", "8"): "store_y(i, eight(load_x(2u * i), load_x(2u * i + 1u)));",
    ("2", "8"): "store_y(i, eight(vec4<f32>(load_x(4u * i), load_x(4u * i + 1u)), "
    "vec4<f32>(load_x(4u * i + 2u), load_x(4u * i + 3u))));",
    ("1", "8"): "store_y(i, eight(vec4<f32>(load_x(8u * i), load_x(8u * i + 1u), "
    "load_x(8u * i + 2u), load_x(8u * i + 3u)), vec4<f32>(load_x(8u * i + 4u), "
    "load_x(8u * i + 5u), load_x(8u * i + 6u), load_x(8u * i + 7u))));",
    ("8", "4"): "let v = load_x(i); store_y(2u * i, low(v)); store_y(2u * i + 1u, high(v));",
    ("8", "2"): "let v = load_x(i); store_y(4u * i, low(v).xy); store_y(4u * i + 1u, low(v).zw); "
    "store_y(4u * i + 2u, high(v).xy); store_y(4u * i + 3u, high(v).zw);",
    ("words", "words"): "store_y(i, load_x(i));",
}


def bits_of(array):
    return np.ascontiguousarray(array, np.float32).view(np.uint32)


def is_nan(bits):
    return (bits & 0x7FFFFFFF) > 0x7F800000


@pytest.fixture
def kernel(monkeypatch):
    """Makes the next launches of `tensor/convert.wgsl` run a shader of these widths."""
    original = wgsl.shader_source

    def use(read, write, memory_x="", memory_y=""):
        source = SHADER.replace("READ", read).replace("WRITE", write)
        source = source.replace("MEMORY_X", memory_x).replace("MEMORY_Y", memory_y)
        source = source.replace("BODY", BODIES[read, write])
        monkeypatch.setattr(
            wgsl, "shader_source", lambda p: source if p == "tensor/convert.wgsl" else original(p)
        )
        wgsl.load_shader.cache_clear()

    yield use
    monkeypatch.undo()
    wgsl.load_shader.cache_clear()


def moved(device, values, x_dtype, y_dtype, read, write):
    """Sends values, bits and all, from one type and memory to another."""
    bench = Bench(device, "float32", PROFILES["cpu"])
    x = matrix("x", *values.shape, x_dtype)
    data = stored_bits(values, x_dtype)
    x.storage = Storage("x", "test", x.nbytes, data)
    y = matrix("y", *values.shape, y_dtype)
    units = x.nbytes // 16 if write == "words" else values.size // 8
    # A label of its own, since pipelines are cached by it.
    constants = {"CASE": True, f"READ_{read}_{write}": True}
    bench.graph.launch("tensor/convert.wgsl", units, {"x": x, "y": y}, {"units": units}, constants)
    (got,) = bench.run_bits(y)
    return got


def values():
    random = np.random.default_rng(3).integers(0, 1 << 32, ROWS * COLUMNS - len(SPECIAL), np.uint64)
    return np.concatenate([SPECIAL, random.astype(np.uint32)]).view(np.float32).reshape(ROWS, -1)


def expected(array, x_dtype, y_dtype):
    given = as_held(array, x_dtype)
    held = as_held(given, y_dtype)
    if y_dtype == "float16":  # the device holds at its end what is finite
        beyond = np.isinf(held) & np.isfinite(given)
        held = np.where(beyond, np.copysign(np.float32(65504), given), held)
    return bits_of(held)


def as_held(array, dtype):
    return stored_floats(stored_bits(array, dtype).tobytes(), dtype).reshape(array.shape)


@pytest.mark.parametrize("memory", ["buffer", "texture"])
@pytest.mark.parametrize("y_dtype", (*DTYPES, "float16"))
@pytest.mark.parametrize("x_dtype", (*DTYPES, "float16"))
@pytest.mark.parametrize(("read", "write"), BODIES)
def test_every_width_type_and_memory(device, kernel, read, write, x_dtype, y_dtype, memory):
    if write == "words" and x_dtype != y_dtype:
        return  # copied as they are
    whole = write in ("8", "words")
    kernel(read, write, memory, memory if whole else "")
    array = values()
    # Subnormals may be flushed by a driver when they are computed with; here nothing is.
    got = moved(device, array, x_dtype, y_dtype, read, write)
    want = expected(array, x_dtype, y_dtype)
    assert np.array_equal(is_nan(got), is_nan(want))
    # float16's subnormals may be flushed, too.
    tiny = 1 / 16384 if "float16" in (x_dtype, y_dtype) else 0.0
    same = ~is_nan(want) & (np.abs(want.view(np.float32)) >= tiny)
    assert np.array_equal(got[same], want[same])
    assert (np.abs(got.view(np.float32))[~same & ~is_nan(want)] <= tiny).all()


def test_rounding_on_the_host_and_on_the_device_agree(device):
    array = values()
    bench = Bench(device, "bfloat16", PROFILES["cpu"])
    y = converted(bench.graph, bench.given(array), "bfloat16")
    (got,) = bench.run_bits(y)
    want = bits_of(from_bfloat16(to_bfloat16(array)))
    assert np.array_equal(is_nan(got), is_nan(want))
    assert np.array_equal(got[~is_nan(want)], want[~is_nan(want)])


def test_nan_stays_nan_on_the_host():
    nan = SPECIAL[:5].view(np.float32)
    assert np.isnan(from_bfloat16(to_bfloat16(nan))).all()
    assert np.isinf(from_bfloat16(to_bfloat16(SPECIAL[5:9].view(np.float32)))).all()
