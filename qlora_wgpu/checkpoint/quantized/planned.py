"""What a config.json alone says of the quantized weights beside it, for plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from qlora_wgpu.checkpoint.quantized.compressed_tensors import (
    FP8,
    INT,
    PACKED,
    CompressedGroups,
    Group,
)
from qlora_wgpu.checkpoint.quantized.compressed_tensors import MXFP4 as MXFP4_KIND
from qlora_wgpu.checkpoint.quantized.group_weights import as_awq_or_gptq
from qlora_wgpu.quant import WeightFormat, nf4_format
from qlora_wgpu.quant.safetensors_formats import (
    INT8,
    MXFP4,
    NVFP4,
    byte_format,
    fp8_format,
    group_format,
    packed_format,
)
from qlora_wgpu.weight_format import WHOLE

_USUAL_BLOCKSIZE = 64  # of bitsandbytes, which does not write it into config.json
_SKIPPED = ("llm_int8_skip_modules", "modules_to_not_convert", "ignore")


class PlannedFormats:
    """The formats that a ``quantization_config`` asks for."""

    def __init__(self, quantization: Mapping[str, Any]) -> None:
        """Notes it."""
        self._config = as_awq_or_gptq(quantization, "config.json")
        self._groups = None
        if quantization.get("quant_method") == "compressed-tensors":
            self._groups = CompressedGroups(quantization, "config.json")
        lists = [quantization.get(key) for key in _SKIPPED]
        names = [name for some in lists if isinstance(some, Sequence) for name in some]
        self._skipped = [name for name in names if isinstance(name, str)]

    def format(self, name: str, columns: int) -> WeightFormat | None:
        """The format of a weight of so many columns; None of one that is kept in floats."""
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
            own = config.get("extra_config")
            layer = own.get(module) if isinstance(own, Mapping) else None
            layer = {**config, **layer} if isinstance(layer, Mapping) else config
            bits, group = _size(layer, "bits", 4), _size(layer, "group_size", 128)
            if bits > 8:
                return None
            return group_format(str(method).upper(), 8 if bits == 8 else 4, columns, group)
        if kind in ("fp8", "fbgemm_fp8", "mxfp8"):
            return self._fp8((1, 32) if kind == "mxfp8" else (1, WHOLE))
        if "nvfp4" in kind:
            return NVFP4
        if kind == "mxfp4":
            return MXFP4
        if config.get("load_in_8bit") or config.get("_load_in_8bit"):
            return INT8
        return nf4_format(_USUAL_BLOCKSIZE, config.get("bnb_4bit_use_double_quant") is True)

    def _fp8(self, usual: tuple[int, int]) -> WeightFormat:
        tile = self._config.get("weight_block_size")
        sizes: list[Any] = tile if isinstance(tile, list) and len(tile) == 2 else [None]
        if all(type(size) is int and size > 0 for size in sizes):
            return fp8_format("F8_E4M3", (sizes[0], sizes[1]))
        return fp8_format("F8_E4M3", usual)


def _of_group(group: Group, columns: int) -> WeightFormat:
    """The format of a weight of a group of compressed-tensors."""
    if group.kind == PACKED:
        return packed_format(group.bits, group.tile, columns, has_zeros=group.has_zeros)
    if group.kind == INT:
        return byte_format(group.tile, columns, has_zeros=group.has_zeros)
    if group.kind == FP8:
        return fp8_format("F8_E4M3", group.tile)
    return MXFP4 if group.kind == MXFP4_KIND else NVFP4


def _size(config: Mapping[str, Any], key: str, usual: int) -> int:
    value = config.get(key)
    return value if type(value) is int and (value > 0 or value == -1) else usual


def _is_skipped(module: str, key: str) -> bool:
    """As transformers matches names: whole parts anywhere, any ending, or a * for any of them."""
    if "*" in key:
        return fnmatchcase(f".{module}.", f"*.{key}.*")
    return f".{key}." in f".{module}." or module.endswith(key)
