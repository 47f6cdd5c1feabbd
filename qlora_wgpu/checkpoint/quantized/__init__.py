"""``quantization_config``: what a folder's weights are stored as, and for plans their formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from qlora_wgpu.checkpoint.quantized import (
    bitsandbytes,
    compressed_tensors,
    float_weights,
    group_weights,
)
from qlora_wgpu.checkpoint.quantized.coded_weight import QuantizedFiles
from qlora_wgpu.checkpoint.stored_weight import Files
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError, brief
from qlora_wgpu.quant import WeightFormat, nf4_format
from qlora_wgpu.quant import safetensors_formats as formats
from qlora_wgpu.weight_format import WHOLE

_SUPPORTED = (
    "bitsandbytes' NF4, FP4 and LLM.int8, AWQ, GPTQ and AutoRound, compressed-tensors, FP8 with a "
    "scale for each tile, row or tensor, NVFP4, and gpt-oss's MXFP4"
)


def quantized_files(path: Path, files: Files, config: Mapping[str, Any]) -> QuantizedFiles:
    """A folder's quantized weights, if it has any."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return QuantizedFiles(files, config, bitsandbytes.Int8Weight, bitsandbytes.FourBitWeight)
    if not isinstance(quantization, Mapping):
        raise CheckpointError(
            f"{path / 'config.json'}: quantization_config must be an object, got "
            f"{brief(quantization)}"
        )
    quantization = group_weights.as_awq_or_gptq(quantization, path)
    method = quantization.get("quant_method", "bitsandbytes")
    if method == "bitsandbytes":
        return QuantizedFiles(files, config, bitsandbytes.Int8Weight, bitsandbytes.FourBitWeight)
    if method == "compressed-tensors":
        return compressed_tensors.compressed_files(files, config, quantization, path)
    if method == "awq":
        groups = group_weights.awq_groups(quantization, path)
        return QuantizedFiles(files, config, partial(group_weights.AwqWeight, groups=groups))
    if method == "gptq":
        groups = group_weights.gptq_groups(quantization, path)
        return QuantizedFiles(files, config, partial(group_weights.GptqWeight, groups=groups))
    if method == "mxfp4":
        scales, kind = float_weights.EXPERT_SCALES, float_weights.Mxfp4ExpertWeight
        return float_weights.Mxfp4ExpertFiles(files, config, kind, unused=scales)
    form = str(quantization.get("quant_algo")) if method == "modelopt" else ""
    if method in ("fp8", "fbgemm_fp8", "mxfp8") or form == "FP8":
        tile = _tile(path, quantization)
        return QuantizedFiles(files, config, partial(float_weights.Fp8Weight, tile=tile))
    if form == "NVFP4":
        return QuantizedFiles(files, config, float_weights.Nvfp4Weight)
    what = brief(method).strip("'") + (f" ({form[:80]})" if form else "")
    raise UnsupportedModelError(
        f"{path} is quantized with {what}, which is not supported (supported: {_SUPPORTED}): use "
        "the unquantized model"
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
            f"{path / 'config.json'}: weight_block_size of quantization_config must be a list of "
            f"two sizes, got {brief(size)}"
        )
    return size[0], size[1]


# ---- plans without weights -----------------------------------------------------------------------

_BLOCKSIZE = 64  # bitsandbytes' default, which it does not write into config.json
_SKIPPED = ("llm_int8_skip_modules", "modules_to_not_convert", "ignore")


class PlannedFormats:
    """The formats of weights, from a ``quantization_config`` alone."""

    def __init__(self, quantization: Mapping[str, Any]) -> None:
        self._config = group_weights.as_awq_or_gptq(quantization, "config.json")
        self._groups = None
        if quantization.get("quant_method") == "compressed-tensors":
            self._groups = compressed_tensors.CompressedGroups(quantization, "config.json")
        lists = [quantization.get(key) for key in _SKIPPED]
        names = [name for some in lists if isinstance(some, Sequence) for name in some]
        self._skipped = [name for name in names if isinstance(name, str)]

    def format(self, name: str, columns: int) -> WeightFormat | None:
        """The format of a weight with this many columns; None if it is not quantized."""
        module = name.removesuffix(".weight")
        if self._groups is not None:
            group = None if self._groups.is_ignored(module) else self._groups.of(module)
            return None if group is None else _of_group(group, columns)
        if any(_is_skipped(module, key) for key in self._skipped):
            return None
        return self._format(module, columns)

    def _format(self, module: str, columns: int) -> WeightFormat | None:
        config = self._config
        method = config.get("quant_method", "bitsandbytes")
        kind = str(config.get("format") or config.get("quant_algo") or method).lower()
        if method in ("awq", "gptq"):
            layers = config.get("extra_config")
            layer = layers.get(module) if isinstance(layers, Mapping) else None
            layer = {**config, **layer} if isinstance(layer, Mapping) else config
            bits, group = _size(layer, "bits", 4), _size(layer, "group_size", 128)
            if bits > 8:
                return None
            return formats.group_format(str(method).upper(), 8 if bits == 8 else 4, columns, group)
        if kind in ("fp8", "fbgemm_fp8", "mxfp8"):
            return self._fp8((1, 32) if kind == "mxfp8" else (1, WHOLE))
        if "nvfp4" in kind:
            return formats.NVFP4
        if kind == "mxfp4":
            return formats.MXFP4
        if config.get("load_in_8bit") or config.get("_load_in_8bit"):
            return formats.INT8
        return nf4_format(_BLOCKSIZE, config.get("bnb_4bit_use_double_quant") is True)

    def _fp8(self, default: tuple[int, int]) -> WeightFormat:
        tile = self._config.get("weight_block_size")
        sizes: list[Any] = tile if isinstance(tile, list) and len(tile) == 2 else [None]
        if all(type(size) is int and size > 0 for size in sizes):
            return formats.fp8_format("F8_E4M3", (sizes[0], sizes[1]))
        return formats.fp8_format("F8_E4M3", default)


def _of_group(group: compressed_tensors.Group, columns: int) -> WeightFormat:
    if group.kind == compressed_tensors.PACKED:
        return formats.packed_format(group.bits, group.tile, columns, has_zeros=group.has_zeros)
    if group.kind == compressed_tensors.INT:
        return formats.byte_format(group.tile, columns, has_zeros=group.has_zeros)
    if group.kind == compressed_tensors.FP8:
        return formats.fp8_format("F8_E4M3", group.tile)
    return formats.MXFP4 if group.kind == compressed_tensors.MXFP4 else formats.NVFP4


def _size(config: Mapping[str, Any], key: str, default: int) -> int:
    value = config.get(key)
    return value if type(value) is int and (value > 0 or value == -1) else default


def _is_skipped(module: str, key: str) -> bool:
    """As transformers matches names: by parts of the path, by endings, or by a pattern with *."""
    if "*" in key:
        return fnmatchcase(f".{module}.", f"*.{key}.*")
    return f".{key}." in f".{module}." or module.endswith(key)
