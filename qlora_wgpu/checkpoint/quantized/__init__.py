"""Quantized weights of safetensors folders, by who quantized them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qlora_wgpu.checkpoint.quantized.bitsandbytes_files import BitsAndBytesFiles
from qlora_wgpu.checkpoint.quantized.compressed_tensors import CompressedFiles
from qlora_wgpu.checkpoint.quantized.files import QuantizedFiles
from qlora_wgpu.checkpoint.quantized.float_files import Fp8Files, Mxfp4Files, Nvfp4Files
from qlora_wgpu.checkpoint.quantized.group_files import AwqFiles, GptqFiles, as_awq_or_gptq
from qlora_wgpu.checkpoint.safetensors_file import SafetensorsFile
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError, brief

__all__ = ["BitsAndBytesFiles", "QuantizedFiles", "quantized_files"]

_READ = (
    "bitsandbytes' NF4, FP4 and LLM.int8, AWQ, GPTQ and AutoRound, compressed-tensors, FP8 with a "
    "scale for each tile, row or tensor, NVFP4, and gpt-oss's MXFP4"
)


def quantized_files(
    path: Path, files: Mapping[str, SafetensorsFile], config: Mapping[str, Any]
) -> QuantizedFiles:
    """The reader of a folder's quantized weights; one that finds none where there are none."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return BitsAndBytesFiles(files, config)
    if not isinstance(quantization, Mapping):
        raise CheckpointError(
            f"{path / 'config.json'}: quantization_config must be an object, got "
            f"{brief(quantization)}"
        )
    quantization = as_awq_or_gptq(quantization, path)
    method = quantization.get("quant_method", "bitsandbytes")
    if method == "bitsandbytes":
        return BitsAndBytesFiles(files, config)
    if method == "compressed-tensors":
        return CompressedFiles(files, config, quantization, path)
    if method == "awq":
        return AwqFiles(files, config, quantization, path)
    if method == "gptq":
        return GptqFiles(files, config, quantization, path)
    if method == "mxfp4":
        return Mxfp4Files(files, config)
    form = str(quantization.get("quant_algo")) if method == "modelopt" else ""
    if method in ("fp8", "fbgemm_fp8", "mxfp8") or form == "FP8":
        return Fp8Files(files, config, _tile(path, quantization))
    if form == "NVFP4":
        return Nvfp4Files(files, config)
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
