"""Weights of every form: products, gradients, experts and float16, as of what they stand for."""

from dataclasses import replace

import numpy as np
import pytest
from support.harness import PROFILES, Bench, assert_checked

from qlora_wgpu.gpu.kernel_config import gpu_profile
from qlora_wgpu.gpu.matrix import MatrixShape
from qlora_wgpu.graph.tensor import Storage, vector
from qlora_wgpu.kernels.dequantize import fits_words
from qlora_wgpu.kernels.lora import Lora
from qlora_wgpu.model.quantized_weights import (
    codebook_tensor,
    lay_out,
    quantized_matrix,
    stacked_arrays,
    words,
)
from qlora_wgpu.ops.linear import linear
from qlora_wgpu.ops.modules import DenseMatrix, Linear
from qlora_wgpu.selfcheck.cases.common import arguments_of
from qlora_wgpu.selfcheck.cases.formats import FORMS, check_format, random_weight


def gradients(bench, w, weight):
    """y, dx, dA and dB of a linear layer with LoRA."""
    rng = np.random.default_rng(0)
    outer, inner = w.shape
    a, b, dy = (rng.standard_normal(shape) for shape in ((4, inner), (outer, 4), (5, outer)))
    zeros = (bench.given(np.zeros(matrix.shape)) for matrix in (a, b))
    lora = Lora(4, 0.5, 0.0, 0, bench.given(a), bench.given(b), *zeros)
    x = bench.operand(rng.standard_normal((5, inner)), grad=True)
    y = linear(bench.graph, x, Linear("layer", weight, None, lora), bench.batch_of(1, 5))
    (dx,) = bench.gradients(y, bench.given(dy), x)
    return bench.run(y, dx, lora.grad_a, lora.grad_b)


@pytest.mark.parametrize("name", FORMS)
def test_gradients_are_those_of_the_dequantized_weights(device, name):
    """On every kind of profile and in both types in turn: each has another inner size."""
    number = list(FORMS).index(name)
    profile, dtype = PROFILES[list(PROFILES)[number % 3]], ("float32", "bfloat16")[number % 2]
    stored = random_weight(FORMS[name], (21, (96, 72, 256)[number // 3 % 3]))
    w = stored.dequantize()
    bench = Bench(device, dtype, profile)
    dense = gradients(bench, w, DenseMatrix(*w.shape, ((0, bench.weight(w)),)))
    bench = Bench(device, dtype, profile)
    matrix = quantized_matrix("w", stored, textures=bench.profile.textures)
    for got, expected in zip(gradients(bench, w, matrix), dense, strict=True):
        assert np.array_equal(got, expected) and np.abs(got).max() > 0


def test_every_form_is_decoded(device):
    for number, arguments in enumerate(arguments_of(check_format)):
        assert_checked(device, ("gpu", "cpu")[number % 2], "bfloat16", check_format, *arguments)


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "MXFP4", "LLM.int8", "FP8", "AWQ"])
def test_experts_one_below_the_other(device, monkeypatch, name):
    shape, form = (12, 96), FORMS[name]
    bench = Bench(device, "float32", PROFILES["texture" if form.bits == 4 else "gpu"])
    one = random_weight(form, shape)
    stored = [replace(one, codes=np.roll(one.codes, i)) for i in range(5)]
    monkeypatch.setattr("qlora_wgpu.ops.quantized._EXPERT_BYTES", 2 * 4 * 12 * 96)
    is_words = bench.profile.textures and fits_words(form, 96)
    codebook = codebook_tensor(form, Storage) if is_words else None
    keep = lambda label, nbytes: Storage(label, "test", nbytes)  # noqa: E731
    matrix, storages = lay_out("w", shape, form, 5, keep, codebook)
    arrays = stacked_arrays(stored, "w", "folder")
    for leaf, storage in storages.items():
        storage.data = words(arrays[leaf])
    shards = list(matrix.expert_shards(bench.graph))
    assert [count for _, count, _ in shards] == [2, 2, 1]
    got = np.concatenate(bench.run(*(tensor for _, _, tensor in shards)))
    assert np.array_equal(got, np.concatenate([weight.dequantize() for weight in stored]))


@pytest.mark.parametrize("name", ["Q4_0", "Q5_K", "FP8", "GPTQ"])
def test_float16_for_matrix_units(device, name):
    stored = random_weight(FORMS[name], (9, 96))
    bench = Bench(device, "bfloat16", gpu_profile(MatrixShape(16, 16, 16, 32), device.limits))
    counts = Storage("saturated", "test", 16, np.zeros(4, np.uint32))
    bench.graph.saturated = vector("saturated", 4, "uint32", counts)
    matrix = quantized_matrix("w", stored, textures=False)
    ((_, tensor),) = matrix.shards(bench.graph)
    assert tensor.dtype == "float16"
    (got,) = bench.run(tensor)
    exact = stored.dequantize()
    beyond, held = np.abs(exact) > 65504, np.clip(exact, -65504, 65504)
    assert (np.abs(got - held) <= np.maximum(2**-11 * np.abs(held), 2**-25)).all()  # the nearest
    assert np.frombuffer(device.read(counts.buffer, 4), np.uint32) == [beyond.sum()]


@pytest.mark.parametrize("name", [name for name in FORMS if FORMS[name].bits == 4])
def test_textures_have_both_values_of_each_byte_of_codes(name):
    form = FORMS[name]
    table = codebook_tensor(form, Storage)
    assert (table.columns, table.dtype, table.texture) == (4 * 256, "float32", True)
    values = np.asarray(table.storage.data).reshape(256, 4)
    assert values[0xA3].tolist() == [form.quant_map[10], form.quant_map[3], 0, 0]
