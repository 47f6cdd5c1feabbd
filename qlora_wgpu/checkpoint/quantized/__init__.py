"""Quantized weights of safetensors folders, by who quantized them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from qlora_wgpu.checkpoint.quantized.bitsandbytes import FourBitWeight, Int8Weight
from qlora_wgpu.checkpoint.quantized.coded_weight import QuantizedFiles
from qlora_wgpu.checkpoint.quantized.compressed_tensors import compressed_files
from qlora_wgpu.checkpoint.quantized.float_weights import (
    EXPERT_SCALES,
    Fp8Weight,
    Mxfp4ExpertFiles,
    Mxfp4ExpertWeight,
    Nvfp4Weight,
)
from qlora_wgpu.checkpoint.quantized.group_weights import (
    AwqWeight,
    GptqWeight,
    as_awq_or_gptq,
    awq_groups,
    gptq_groups,
)
from qlora_wgpu.checkpoint.stored_weight import Files
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError, brief

_READ = (
    "bitsandbytes' NF4, FP4 and LLM.int8, AWQ, GPTQ and AutoRound, compressed-tensors, FP8 with a "
    "scale for each tile, row or tensor, NVFP4, and gpt-oss's MXFP4"
)


def quantized_files(path: Path, files: Files, config: Mapping[str, Any]) -> QuantizedFiles:
    """A folder's quantized weights, of which there may be none."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return QuantizedFiles(files, config, Int8Weight, FourBitWeight)
    if not isinstance(quantization, Mapping):
        raise CheckpointError(
            f"{path / 'config.json'}: quantization_config must be an object, got "
            f"{brief(quantization)}"
        )
    quantization = as_awq_or_gptq(quantization, path)
    method = quantization.get("quant_method", "bitsandbytes")
    if method == "bitsandbytes":
        return QuantizedFiles(files, config, Int8Weight, FourBitWeight)
    if method == "compressed-tensors":
        return compressed_files(files, config, quantization, path)
    if method == "awq":
        awq = partial(AwqWeight, groups=awq_groups(quantization, path))
        return QuantizedFiles(files, config, awq)
    if method == "gptq":
        gptq = partial(GptqWeight, groups=gptq_groups(quantization, path))
        return QuantizedFiles(files, config, gptq)
    if method == "mxfp4":
        return Mxfp4ExpertFiles(files, config, Mxfp4ExpertWeight, unused=EXPERT_SCALES)
    form = str(quantization.get("quant_algo")) if method == "modelopt" else ""
    if method in ("fp8", "fbgemm_fp8", "mxfp8") or form == "FP8":
        tile = _tile(path, quantization)
        return QuantizedFiles(files, config, partial(Fp8Weight, tile=tile))
    if form == "NVFP4":
        return QuantizedFiles(files, config, Nvfp4Weight)
    what = brief(method).strip("'") + (f" ({form[:80]})" if form else "")
    raise UnsupportedModelError(
        f"{path} is quantized with {what}, but only {_READ} are read: take the unquantized model"
    )


def _tile(path: Path, quantization: Mapping[str, Any]) -> tuple[int, int] | None:
    size = quantization.get("weight_block_size")
    if size is None:
        return (1, 32) if quantization["quant_method"] == "mxfp8" else None
    if (
        not isinstance(size, list)
        or len(size) != 2
        or not all(type(length) is int and 0 < length < 2**20 for length in size)
    ):
        raise CheckpointError(
            f"{path / 'config.json'}: weight_block_size of quantization_config must be two sizes, "
            f"got {brief(size)}"
        )
    return size[0], size[1]
