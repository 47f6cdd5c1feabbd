"""Quantized weights of all formats that the kernels decode."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.graph.tensor import LARGEST_FLOAT16, Storage, Tensor
from qlora_wgpu.kernels.dequantize import fits_words
from qlora_wgpu.model.quantized_weights import (
    codebook_tensor,
    device_arrays,
    lay_out,
    quantized_matrix,
    stacked_arrays,
    words,
)
from qlora_wgpu.ops.quantized import QuantizedMatrix, dequantize_together
from qlora_wgpu.quant import GGML_FORMATS, QuantizedWeight, WeightFormat, quantize_nf4
from qlora_wgpu.quant.safetensors_formats import (
    INT8,
    MXFP4,
    NVFP4,
    byte_format,
    fp8_format,
    group_format,
    packed_format,
)
from qlora_wgpu.selfcheck.cases.common import each, normal
from qlora_wgpu.selfcheck.runner import Runner
from qlora_wgpu.weight_format import WHOLE

FORMS = {
    **{name: form.form for name, form in GGML_FORMATS.items()},
    "MXFP4": MXFP4,
    "NVFP4": NVFP4,
    "LLM.int8": INT8,
    "FP8": fp8_format("F8_E4M3", (32, 40)),
    "GPTQ": group_format("GPTQ", 4, 72, 32),
    "AWQ": group_format("AWQ", 4, 96, 32),
    "GPTQ of groups that end in a row": group_format("GPTQ", 4, 96, 64),
    "INT4": packed_format(4, (1, 32), 96, has_zeros=False),
    "INT4 with zeros": packed_format(4, (1, 32), 96, has_zeros=True),
    "INT8 with zeros": byte_format((1, WHOLE), 72, has_zeros=True),
}


def random_weight(form: WeightFormat, shape: tuple[int, int]) -> QuantizedWeight:
    """All codes and scales of many magnitudes, deterministic in the arguments."""
    random = np.random.default_rng([*form.name.encode(), *shape])
    pair = (2,) if form.has_minima else ()
    blocks, nested, scale_map = form.block_count(*shape), None, None
    # With few binary digits, as in files, so that fused multiply-adds make no difference.
    scales: Any = _numbers(random, (blocks, *pair))
    if form.nested_blocksize is not None:
        nested = _numbers(random, (-(-blocks // form.nested_blocksize), *pair))
        scales = random.integers(0, 64, (blocks, *pair), dtype=np.uint8)
        scale_map = np.arange(256, dtype=np.float32)
    codes = random.integers(0, 256, form.code_bytes(*shape), dtype=np.uint8)
    if not np.isfinite(form.quant_map).all():
        codes[~np.isfinite(form.quant_map)[codes]] = 0
    return QuantizedWeight(
        shape=shape,
        format=form,
        codes=codes,
        absmax=scales,
        nested_absmax=nested,
        nested_quant_map=scale_map,
    )


def _numbers(random: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Numbers of both signs with ten binary digits."""
    digits = random.integers(256, 1024, shape) * random.choice([-1, 1], shape)
    numbers: npt.NDArray[np.float32] = np.ldexp(digits, -9).astype(np.float32)
    return numbers


def _nearest_float16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Eleven binary digits, ties rounded up, as in ``common/float16.wgsl``."""
    bits = (values.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.clip(bits.view(np.float32), -LARGEST_FLOAT16, LARGEST_FLOAT16)


@each(
    ("Q4_1", (37, 160)),  # 32 rows are more than one tile of dequantize/forward_shared.wgsl
    ("Q4_K", (9, 256)),
    ("Q5_K", (35, 256)),
    ("Q5_K", (9, 256)),
    ("Q6_K", (9, 256)),
    ("IQ4_NL", (9, 64)),
    ("MXFP4", (37, 96)),
    ("NVFP4", (37, 48)),
    ("Q8_0", (37, 96)),
    ("LLM.int8", (37, 20)),
    ("LLM.int8", (37, 72)),
    ("FP8", (37, 90)),
    ("FP8", (70, 96)),
    ("GPTQ", (37, 72)),
    ("AWQ", (37, 96)),
    ("GPTQ of groups that end in a row", (37, 96)),
    ("INT4 with zeros", (37, 96)),
    ("INT8 with zeros", (37, 72)),
)
def check_format(run: Runner, name: str, shape: tuple[int, int]) -> None:
    """Weights as in their files, bit-exact, in several shards."""
    weight = random_weight(FORMS[name], shape)
    matrix = quantized_matrix("w", weight, textures=run.graph.profile.textures)
    run.graph.max_binding = 32 * run.weight(np.zeros((1, shape[1]))).nbytes
    _compare(run, [shard for _, shard in matrix.shards(run.graph)], weight.dequantize())


@each(("Q4_0",), ("Q4_1",))
def check_large_weights(run: Runner, name: str) -> None:
    """Some beyond float16's range, in some blocks of each of several tiles."""
    weight = random_weight(FORMS[name], (300, 64))
    scales = weight.absmax.astype(np.float32)
    scales[5::150] *= np.float32(2**14)
    large = replace(weight, absmax=scales)
    matrix = quantized_matrix("w", large, textures=run.graph.profile.textures)
    _compare(run, [shard for _, shard in matrix.shards(run.graph)], large.dequantize())


def experts_of(
    run: Runner, stored: list[QuantizedWeight], whole: Storage | None = None
) -> QuantizedMatrix:
    """Experts of one format, with their parts in ``whole`` if given."""
    form, shape = stored[0].format, stored[0].shape
    is_words = whole is None and run.graph.profile.textures and fits_words(form, shape[1])

    def keep(label: str, nbytes: int) -> Storage:
        return Storage(label, "check", nbytes)

    codebook = codebook_tensor(form, Storage) if is_words else None
    matrix, storages = lay_out(
        "w", shape, form, len(stored), whole.part if whole else keep, codebook
    )
    arrays = stacked_arrays(stored, "w", "check")
    for leaf, storage in storages.items():
        storage.data = words(arrays[leaf])
    return matrix


@each(("Q6_K", (12, 72)), ("FP8", (12, 40)), ("GPTQ", (12, 72)), ("Q4_K", (12, 96)))
def check_format_of_experts(run: Runner, name: str, shape: tuple[int, int]) -> None:
    """Three experts of a format, two at a time, each with its own codes, scales and maps."""
    first = random_weight(FORMS[name], shape)
    stored = [replace(first, codes=np.roll(first.codes, i)) for i in range(3)]
    matrix = experts_of(run, stored)
    run.graph.max_binding = 2 * run.weight(np.zeros(shape)).nbytes
    shards = [shard for _, _, shard in matrix.expert_shards(run.graph)]
    _compare(run, shards, np.concatenate([weight.dequantize() for weight in stored]))


def stored_weight(
    form: str, rows: int, columns: int, number: int = 0, blocksize: int = 64
) -> QuantizedWeight:
    """A weight of a format, a different one for each number."""
    if form in FORMS:
        first = random_weight(FORMS[form], (rows, columns))
        return replace(first, codes=np.roll(first.codes, number))
    values = normal(f"{form} {number}", rows, columns).astype(np.float32)
    return quantize_nf4(values, blocksize, form == "double")


def in_one_range(weights: list[QuantizedWeight], whole: Storage) -> list[QuantizedMatrix]:
    """Matrices whose parts are in one storage, as in a layer."""
    matrices = []
    for weight in weights:
        matrix, storages = lay_out("w", weight.shape, weight.format, 1, whole.part, None)
        arrays = device_arrays(weight)
        for leaf, storage in storages.items():
            storage.data = words(arrays[leaf])
        matrices.append(matrix)
    return matrices


@each(("double", 72, 3), ("NF4", 72, 2), ("Q6_K", 72, 2), ("Q4_K", 96, 3), ("GPTQ", 72, 3))
def check_format_of_a_group(run: Runner, name: str, columns: int, count: int) -> None:
    """Matrices of one input together, with all parts in one range of a storage."""
    rows = (72, 8, 60)[:count]
    weights = [stored_weight(name, own, columns, n, 32) for n, own in enumerate(rows)]
    matrices = in_one_range(weights, Storage("group", "check", 256))
    stored = [weight.dequantize() for weight in weights]
    exact = np.concatenate(stored)
    w = run.graph.weight("w", *exact.shape)
    dequantize_together(run.graph, w, matrices)
    if name != "double":
        _compare(run, [w], exact)
        return
    (got,) = run.run(w)
    run.compare(got, run.rounded_weight(exact.astype(np.float64)), w.dtype)


def _compare(run: Runner, shards: list[Tensor], exact: npt.NDArray[np.float32]) -> None:
    got = np.concatenate(run.run(*shards))
    if shards[0].dtype == "float16":
        exact = _nearest_float16(exact)
    run.compare_exactly(got, run.rounded_weight(exact.astype(np.float64)))
