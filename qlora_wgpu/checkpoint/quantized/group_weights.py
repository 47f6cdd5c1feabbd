"""AWQ, GPTQ and AutoRound: integers with a scale and a zero point per group.

``X.qweight`` has integers in 32-bit words; ``X.scales`` and ``X.qzeros`` have those of each group.
AWQ packs columns of (in_features, out_features), GPTQ packs rows and stores zero points minus one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.quantized.coded_weight import CodedWeight
from qlora_wgpu.checkpoint.stored_weight import Files, FloatArray
from qlora_wgpu.errors import UnsupportedModelError, brief
from qlora_wgpu.quant import QuantizedWeight, WeightFormat
from qlora_wgpu.quant.safetensors_formats import group_format, grouped_weight, unpack, unpack_awq

# ---- AutoRound's configuration -------------------------------------------------------------------

_PACKED = {
    "auto": {"quant_method": "gptq"},
    "auto_round:gptq": {"quant_method": "gptq"},
    "auto_round:auto_gptq": {"quant_method": "gptq"},
    "auto_round": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "auto_round:gptqmodel": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "auto_round:awq": {"quant_method": "awq"},
    "auto_round:auto_awq": {"quant_method": "awq"},
}
_ROTATIONS = ("rotation_config", "spinquant_config", "rotation_configs")


def as_awq_or_gptq(quantization: Mapping[str, Any], place: object) -> Mapping[str, Any]:
    """AutoRound's ``quantization_config`` as AWQ's or GPTQ's; any other unchanged."""
    if quantization.get("quant_method") != "auto-round":
        return quantization
    packing = quantization.get("packing_format", "auto_round:auto_gptq")
    packed = _PACKED.get(packing) if isinstance(packing, str) else None
    if packed is None or quantization.get("data_type", "int") != "int":
        raise UnsupportedModelError(
            f"{place} is quantized with AutoRound and packed as {brief(packing)}, but only "
            "integers in GPTQ's and AWQ's layouts are supported: use the unquantized model"
        )
    if any(quantization.get(key) for key in _ROTATIONS):
        raise UnsupportedModelError(
            f"{place}: rotated weights of AutoRound are not supported: use the unquantized model"
        )
    # The packing alone decides whether zero points are stored minus one.
    own = {key: value for key, value in quantization.items() if key != "checkpoint_format"}
    return {**own, **packed}


# ---- AWQ and GPTQ --------------------------------------------------------------------------------

_WORDS = ("I32", "U32")
_LAYOUTS = ("gptq", "gptq_v2")
_PER_LAYER = ("dynamic", "extra_config")  # of GPTQModel, of AutoRound


IntArray = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Groups:
    """config.json's settings for all layers."""

    bits: int  # of an integer
    size: int  # weights of a row that share a scale, or -1 for all
    differ: bool  # whether layers may differ, as the shapes of their tensors show
    less_one: bool  # whether zero points are stored minus one


def awq_groups(quantization: Mapping[str, Any], path: object) -> Groups:
    """AWQ's settings; layouts other than "gemm" are refused."""
    groups = _groups(quantization, path, AwqWeight, less_one=False)
    keys = ("version", "format", "checkpoint_format")
    layout = next((quantization[key] for key in keys if key in quantization), "gemm")
    if str(layout).lower() != "gemm":
        raise UnsupportedModelError(
            f"{path}: AWQ's layout {brief(layout)} is not supported (supported: gemm): use the "
            "unquantized model"
        )
    return groups


def gptq_groups(quantization: Mapping[str, Any], path: object) -> Groups:
    """GPTQ's settings; only its first version stores zero points minus one."""
    layout = quantization.get("checkpoint_format", "gptq")
    groups = _groups(quantization, path, GptqWeight, less_one=layout == "gptq")
    if layout not in _LAYOUTS or quantization.get("is_marlin_format"):
        name = "marlin" if layout in _LAYOUTS else layout
        raise UnsupportedModelError(
            f"{path}: GPTQ's layout {brief(name)} is not supported (supported: "
            f"{', '.join(_LAYOUTS)}): use the unquantized model"
        )
    return groups


def _groups(
    quantization: Mapping[str, Any], path: object, of: type[GroupWeight], *, less_one: bool
) -> Groups:
    bits: int = quantization.get("bits", quantization.get("w_bit", 4))
    size: int = quantization.get("group_size", quantization.get("q_group_size", 128))
    if bits not in of.all_bits:
        raise UnsupportedModelError(
            f"{path}: {of.method} with {bits!r} bits is not supported (supported: "
            f"{', '.join(map(str, of.all_bits))}): use the unquantized model"
        )
    if type(size) is not int or not (size == -1 or 0 < size < 2**20):
        raise UnsupportedModelError(
            f"{path}: {of.method}'s group_size must be a positive integer or -1, got {size!r}"
        )
    return Groups(bits, size, any(map(quantization.get, _PER_LAYER)), less_one)


class GroupWeight(CodedWeight):
    """The common part of AWQ's and GPTQ's weights."""

    codes_leaf = "qweight"
    companions = ("qzeros", "scales", "g_idx")
    method = ""
    all_bits: tuple[int, ...] = ()

    def __init__(self, files: Files, name: str, torch_dtype: str, *, groups: Groups) -> None:
        super().__init__(files, name, torch_dtype)
        self._groups = groups

    @property
    def exists(self) -> bool:
        """Whether the files have its integers."""
        return self.name.endswith(".weight") and self.tensor in self._files

    @property
    def format(self) -> WeightFormat | None:
        """Integers in contiguous groups."""
        codes = 4 if self._bits <= 4 else 8
        return group_format(self.method, codes, self.shape[1], self._group_size)

    def quantized(self) -> QuantizedWeight | None:
        """Codes and scales, with minima from the zero points."""
        form = self.format
        return None if form is None else grouped_weight(form, *self._parts())

    def _parts(self) -> tuple[IntArray, IntArray, FloatArray]:
        """Integers (in_features, out_features), zero points and scales (groups, out_features)."""
        rows, columns = self.shape
        groups = _count(columns, self._group_size)
        scales = self._floats("scales", (groups, rows))
        zeros = self._raw("qzeros", _WORDS, (groups, rows * self._bits // 32)).view(np.int32)
        words = self._raw(self.codes_leaf, _WORDS).view(np.int32)
        return self._integers(words), self._zeros(zeros), scales

    @abstractmethod
    def _integers(self, words: npt.NDArray[np.int32]) -> IntArray:
        """Integers (in_features, out_features)."""

    @abstractmethod
    def _zeros(self, words: npt.NDArray[np.int32]) -> IntArray:
        """Zero points (groups, out_features)."""

    @property
    def _bits(self) -> int:
        """Bits of its integers: config.json's, or if layers differ, from the zero points' shape."""
        default = self._groups.bits
        if self._groups.differ and self._has("qzeros") and self._has("scales"):
            words, numbers = (self._matrix(leaf)[1] for leaf in ("qzeros", "scales"))
            return next((b for b in self.all_bits if numbers * b == words * 32), default)
        return default

    @property
    def _group_size(self) -> int:
        """Group size: config.json's, or if layers differ, from the scales' shape."""
        default, columns = self._groups.size, self.shape[1]
        if self._groups.differ and self._has("scales"):
            groups = self._matrix("scales")[0]
            if groups and groups != _count(columns, default) and columns % groups == 0:
                return -1 if groups == 1 else columns // groups
        return default


class AwqWeight(GroupWeight):
    """AWQ's "gemm" layout."""

    method = "AWQ"
    all_bits = (4,)

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features): (8 · words of a row, rows of words)."""
        columns, words = self._matrix(self.codes_leaf)
        return 8 * words, columns

    def _integers(self, words: npt.NDArray[np.int32]) -> IntArray:
        return unpack_awq(words)

    def _zeros(self, words: npt.NDArray[np.int32]) -> IntArray:
        return unpack_awq(words)


class GptqWeight(GroupWeight):
    """Both versions of GPTQ's layout.

    With ``desc_act`` the columns of a group are not contiguous, and no kernel reads them.
    """

    method = "GPTQ"
    all_bits = (2, 3, 4, 8)

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features): (columns of words, integers in a column)."""
        words, rows = self._matrix(self.codes_leaf)
        return rows, words * 32 // self._bits

    @property
    def format(self) -> WeightFormat | None:
        """Integers in contiguous groups; None with act order."""
        return super().format if self._order is None else None

    def _dequantize_act_order(self) -> FloatArray:
        """(q - zero) · scale, by the group of each column."""
        codes, zeros, scales = self._parts()
        values = codes.astype(np.float32) - zeros[self._order]
        values *= scales[self._order]
        return np.ascontiguousarray(values.T)

    @property
    def _order(self) -> npt.NDArray[np.int32] | None:
        size = self._group_size
        return self._group_of_columns("g_idx", self.shape[1] if size == -1 else size)

    def _integers(self, words: npt.NDArray[np.int32]) -> IntArray:
        return np.ascontiguousarray(unpack(np.ascontiguousarray(words.T), self._bits).T)

    def _zeros(self, words: npt.NDArray[np.int32]) -> IntArray:
        zeros, bits = unpack(words, self._bits), self._bits
        return zeros + np.uint8(1) & np.uint8(2**bits - 1) if self._groups.less_one else zeros


def _count(columns: int, group: int) -> int:
    return 1 if group == -1 else -(-columns // group)
