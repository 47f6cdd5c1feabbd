"""Weights that AWQ, GPTQ or AutoRound quantized: integers with a scale and a zero per group.

``X.qweight`` holds 32-bit words of them, ``X.scales`` and ``X.qzeros`` those of each group. AWQ
packs columns of (in_features, out_features), GPTQ packs rows, and its zeros are stored less one.
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
    """AutoRound's ``quantization_config`` as one of AWQ or GPTQ; any other as it is."""
    if quantization.get("quant_method") != "auto-round":
        return quantization
    packing = quantization.get("packing_format", "auto_round:auto_gptq")
    packed = _PACKED.get(packing) if isinstance(packing, str) else None
    if packed is None or quantization.get("data_type", "int") != "int":
        raise UnsupportedModelError(
            f"{place} is quantized with AutoRound and packed as {brief(packing)}, but only its "
            "integers in GPTQ's and AWQ's layouts are read: take the unquantized model"
        )
    if any(quantization.get(key) for key in _ROTATIONS):
        raise UnsupportedModelError(
            f"{place} has weights that AutoRound rotated, which is not computed: take the "
            "unquantized model"
        )
    # Zeros of the second layout are as they are, of the first less one, whatever else is said.
    own = {key: value for key, value in quantization.items() if key != "checkpoint_format"}
    return {**own, **packed}


# ---- AWQ and GPTQ --------------------------------------------------------------------------------

_WORDS = ("I32", "U32")
_LAYOUTS = ("gptq", "gptq_v2")
_OF_SINGLE_LAYERS = ("dynamic", "extra_config")  # of GPTQModel, of AutoRound


IntArray = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Groups:
    """What config.json says of all layers."""

    bits: int  # of an integer
    size: int  # weights of a row that share a scale, or -1 for all
    differ: bool  # whether layers may have others, which their tensors' shapes tell
    less_one: bool  # whether zeros are stored less one


def awq_groups(quantization: Mapping[str, Any], path: object) -> Groups:
    """AWQ's; layouts other than "gemm" are refused."""
    groups = _groups(quantization, path, AwqWeight, less_one=False)
    keys = ("version", "format", "checkpoint_format")
    layout = next((quantization[key] for key in keys if key in quantization), "gemm")
    if str(layout).lower() != "gemm":
        raise UnsupportedModelError(
            f"{path} is quantized with AWQ in its layout {brief(layout)}, but only gemm is "
            "read: take the unquantized model"
        )
    return groups


def gptq_groups(quantization: Mapping[str, Any], path: object) -> Groups:
    """GPTQ's, whose second version stores zeros as they are."""
    layout = quantization.get("checkpoint_format", "gptq")
    groups = _groups(quantization, path, GptqWeight, less_one=layout == "gptq")
    if layout not in _LAYOUTS or quantization.get("is_marlin_format"):
        raise UnsupportedModelError(
            f"{path} is quantized with GPTQ in its layout "
            f"{brief('marlin' if layout in _LAYOUTS else layout)}, but only "
            f"{' and '.join(_LAYOUTS)} are read: take the unquantized model"
        )
    return groups


def _groups(
    quantization: Mapping[str, Any], path: object, of: type[GroupWeight], *, less_one: bool
) -> Groups:
    bits: int = quantization.get("bits", quantization.get("w_bit", 4))
    size: int = quantization.get("group_size", quantization.get("q_group_size", 128))
    if bits not in of.all_bits:
        raise UnsupportedModelError(
            f"{path} is quantized with {of.method} to {bits!r} bits, but only "
            f"{' or '.join(map(str, of.all_bits))} are read: take the unquantized model"
        )
    if type(size) is not int or not (size == -1 or 0 < size < 2**20):
        raise UnsupportedModelError(
            f"{path} is quantized with {of.method} in groups of {size!r} weights, "
            "which is no size: take the unquantized model"
        )
    return Groups(bits, size, any(map(quantization.get, _OF_SINGLE_LAYERS)), less_one)


class GroupWeight(CodedWeight):
    """What AWQ's and GPTQ's weights have in common."""

    codes_leaf = "qweight"
    companions = ("qzeros", "scales", "g_idx")
    method = ""
    all_bits: tuple[int, ...] = ()

    def __init__(self, files: Files, name: str, torch_dtype: str, *, groups: Groups) -> None:
        """As its class."""
        super().__init__(files, name, torch_dtype)
        self._groups = groups

    @property
    def is_there(self) -> bool:
        """Whether its integers are."""
        return self.name.endswith(".weight") and self.tensor in self._files

    @property
    def format(self) -> WeightFormat | None:
        """Integers in groups of neighbours."""
        codes = 4 if self._bits <= 4 else 8
        return group_format(self.method, codes, self.shape[1], self._group_size)

    def quantized(self) -> QuantizedWeight | None:
        """Codes, and scales with the minima that zeros make."""
        form = self.format
        return None if form is None else grouped_weight(form, *self._parts())

    def _parts(self) -> tuple[IntArray, IntArray, FloatArray]:
        """Integers (in_features, out_features), and zeros and scales (groups, out_features)."""
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
        """Zeros (groups, out_features)."""

    @property
    def _bits(self) -> int:
        """Bits of its integers: config.json's, or those that its zeros have."""
        usual = self._groups.bits
        if self._groups.differ and self._has("qzeros") and self._has("scales"):
            words, numbers = (self._matrix(leaf)[1] for leaf in ("qzeros", "scales"))
            return next((b for b in self.all_bits if numbers * b == words * 32), usual)
        return usual

    @property
    def _group_size(self) -> int:
        """Weights of a row that share a scale, or -1: config.json's, or as scales are there."""
        usual, columns = self._groups.size, self.shape[1]
        if self._groups.differ and self._has("scales"):
            groups = self._matrix("scales")[0]
            if groups and groups != _count(columns, usual) and columns % groups == 0:
                return -1 if groups == 1 else columns // groups
        return usual


class AwqWeight(GroupWeight):
    """AWQ's "gemm" layout."""

    method = "AWQ"
    all_bits = (4,)

    @property
    def shape(self) -> tuple[int, int]:
        """(8 · words of a row, rows of words)."""
        columns, words = self._matrix(self.codes_leaf)
        return 8 * words, columns

    def _integers(self, words: npt.NDArray[np.int32]) -> IntArray:
        return unpack_awq(words)

    def _zeros(self, words: npt.NDArray[np.int32]) -> IntArray:
        return unpack_awq(words)


class GptqWeight(GroupWeight):
    """GPTQ's layout, of both versions.

    Where the columns of a group are no neighbours (``desc_act``), no kernel reads them.
    """

    method = "GPTQ"
    all_bits = (2, 3, 4, 8)

    @property
    def shape(self) -> tuple[int, int]:
        """(Columns of words, weights of a column of words)."""
        words, rows = self._matrix(self.codes_leaf)
        return rows, words * 32 // self._bits

    @property
    def format(self) -> WeightFormat | None:
        """Integers in groups of neighbours, or None if columns are in another order."""
        return super().format if self._order is None else None

    def _shuffled(self) -> FloatArray:
        """(q - zero) · scale, each column's by its group."""
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
