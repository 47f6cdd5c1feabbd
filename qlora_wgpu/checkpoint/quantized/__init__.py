"""Quantized weights of safetensors folders, by who quantized them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qlora_wgpu.checkpoint.quantized.bitsandbytes_files import BitsAndBytesFiles
from qlora_wgpu.checkpoint.quantized.files import QuantizedFiles
from qlora_wgpu.checkpoint.quantized.float4_files import Nvfp4Files
from qlora_wgpu.checkpoint.quantized.fp8_files import Fp8Files, stored_tile
from qlora_wgpu.checkpoint.quantized.group_files import AwqFiles, GptqFiles
from qlora_wgpu.checkpoint.quantized.mxfp4_files import Mxfp4Files
from qlora_wgpu.checkpoint.safetensors_file import SafetensorsFile
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError, brief

__all__ = ["BitsAndBytesFiles", "QuantizedFiles", "quantized_files"]

_READ = (
    "bitsandbytes' NF4, FP4 and LLM.int8, AWQ and GPTQ, FP8 with a scale for each tile, row or "
    "tensor, NVFP4, and gpt-oss's MXFP4"
)


def quantized_files(
    path: Path, files: Mapping[str, SafetensorsFile], config: Mapping[str, Any]
) -> QuantizedFiles:
    """The reader of a folder's quantized weights; one that finds none where there are none.

    Args:
        path: The folder, for messages.
        files: Which open file holds which tensor.
        config: The config.json.

    Raises:
        CheckpointError: If ``quantization_config`` is damaged.
        UnsupportedModelError: If it says something that is not read.
    """
    quantization = config.get("quantization_config")
    if quantization is None:
        return BitsAndBytesFiles(files, config)
    if not isinstance(quantization, Mapping):
        raise CheckpointError(
            f"{path / 'config.json'}: quantization_config must be an object, got "
            f"{brief(quantization)}"
        )
    method = quantization.get("quant_method", "bitsandbytes")
    if method == "bitsandbytes":
        return BitsAndBytesFiles(files, config)
    if method in ("fp8", "fbgemm_fp8"):
        return Fp8Files(files, config, _tile(path, quantization))
    if method == "awq":
        _check_awq(path, quantization)
        return AwqFiles(files, config, quantization, path)
    if method == "gptq":
        return GptqFiles(files, config, quantization, path)
    if method == "mxfp4":
        return Mxfp4Files(files, config)
    form = _form(method, quantization)
    if form == "fp8":
        return Fp8Files(files, config, _tile(path, quantization))
    if form == "nvfp4":
        return Nvfp4Files(files, config)
    what = brief(method).strip("'") + (f" ({form})" if form else "")
    raise UnsupportedModelError(
        f"{path} is quantized with {what}, but only {_READ} are read: take the unquantized model"
    )


def _form(method: Any, quantization: Mapping[str, Any]) -> str:
    """Which of their forms compressed-tensors or ModelOpt used, as it is called here if it is."""
    if method == "compressed-tensors":
        form = str(quantization.get("format"))
        return {"float-quantized": "fp8", "nvfp4-pack-quantized": "nvfp4"}.get(form, form)
    if method == "modelopt":
        form = str(quantization.get("quant_algo"))
        return {"FP8": "fp8", "NVFP4": "nvfp4"}.get(form, form)
    return ""


def _tile(path: Path, quantization: Mapping[str, Any]) -> tuple[int, int] | None:
    size = stored_tile(quantization)
    if size is None:
        return None
    if (
        not isinstance(size, list)
        or len(size) != 2
        or not all(type(length) is int and 0 < length < 2**20 for length in size)
    ):
        raise CheckpointError(
            f"{path / 'config.json'}: weight_block_size, or block_structure, of "
            f"quantization_config must be two sizes, got {brief(size)}"
        )
    return size[0], size[1]


def _check_awq(path: Path, quantization: Mapping[str, Any]) -> None:
    version = str(quantization.get("version", quantization.get("format", "gemm"))).lower()
    if version != "gemm":
        raise UnsupportedModelError(
            f"{path} is quantized with AWQ in its layout {brief(version)}, but only gemm is read: "
            "take the unquantized model"
        )
