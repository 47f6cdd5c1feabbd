"""What a config.json alone says of the quantized weights beside it, for plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from qlora_wgpu.checkpoint.quantized.fp8_files import stored_tile
from qlora_wgpu.quant import NESTED_BLOCKSIZE, NF4_QUANT_MAP, WeightFormat
from qlora_wgpu.quant.eight_bits import INT8, fp8_format
from qlora_wgpu.quant.float4 import MXFP4, NVFP4
from qlora_wgpu.quant.integer_groups import group_format
from qlora_wgpu.weight_format import WHOLE

_USUAL_BLOCKSIZE = 64  # of bitsandbytes, which does not write it into config.json
_SKIPPED = ("llm_int8_skip_modules", "modules_to_not_convert", "ignore")


class PlannedFormats:
    """The formats that a ``quantization_config`` asks for."""

    def __init__(self, quantization: Mapping[str, Any]) -> None:
        """Notes it."""
        self._config = quantization
        lists = [quantization.get(key) for key in _SKIPPED]
        names = [name for some in lists if isinstance(some, Sequence) for name in some]
        self._skipped = [name for name in names if isinstance(name, str)]

    def format(self, name: str, columns: int) -> WeightFormat | None:
        """The format of a weight of so many columns; None of one that is kept in floats."""
        module = name.removesuffix(".weight")
        if any(_is_skipped(module, key) for key in self._skipped):
            return None
        return self._format(columns)

    def _format(self, columns: int) -> WeightFormat:
        config = self._config
        method = config.get("quant_method", "bitsandbytes")
        kind = str(config.get("format") or config.get("quant_algo") or method).lower()
        if method in ("awq", "gptq"):
            bits, group = _size(config, "bits", 4), _size(config, "group_size", 128)
            return group_format(str(method).upper(), 8 if bits == 8 else 4, columns, group)
        if kind in ("fp8", "fbgemm_fp8", "float-quantized"):
            return self._fp8()
        if "nvfp4" in kind:
            return NVFP4
        if kind == "mxfp4":
            return MXFP4
        if config.get("load_in_8bit") or config.get("_load_in_8bit"):
            return INT8
        double = config.get("bnb_4bit_use_double_quant") is True
        nested = NESTED_BLOCKSIZE if double else None
        return WeightFormat("NF4", NF4_QUANT_MAP, _USUAL_BLOCKSIZE, nested, has_offset=double)

    def _fp8(self) -> WeightFormat:
        tile = stored_tile(self._config)
        sizes: list[Any] = tile if isinstance(tile, list) and len(tile) == 2 else [None]
        if all(type(size) is int and size > 0 for size in sizes):
            return fp8_format("F8_E4M3", (sizes[0], sizes[1]))
        return fp8_format("F8_E4M3", (1, WHOLE))


def _size(config: Mapping[str, Any], key: str, usual: int) -> int:
    value = config.get(key)
    return value if type(value) is int and (value > 0 or value == -1) else usual


def _is_skipped(module: str, key: str) -> bool:
    """As transformers matches names: whole parts anywhere, any ending, or a * for any of them.

    compressed-tensors' patterns are left: they name what is no linear layer of the text's.
    """
    if "*" in key:
        return fnmatchcase(f".{module}.", f"*.{key}.*")
    return f".{key}." in f".{module}." or module.endswith(key)
