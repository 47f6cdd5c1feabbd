"""Folders that AWQ, GPTQ or AutoRound quantized: integers with a scale and a zero per group.

``X.qweight`` holds 32-bit words of them, ``X.scales`` and ``X.qzeros`` those of each group. AWQ
packs columns of (in_features, out_features), GPTQ packs rows, and its zeros are stored less one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.quantized.files import QuantizedFiles
from qlora_wgpu.checkpoint.safetensors_file import SafetensorsFile
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
    """AutoRound's ``quantization_config`` as one of AWQ or GPTQ; any other as it is.

    Args:
        quantization: The ``quantization_config``.
        place: The folder, for messages.
    """
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


class GroupFiles(QuantizedFiles):
    """What AWQ's and GPTQ's folders have in common."""

    codes_leaf = "qweight"
    companions = ("qzeros", "scales", "g_idx")
    method = ""
    all_bits: tuple[int, ...] = ()

    def __init__(
        self,
        files: Mapping[str, SafetensorsFile],
        config: Mapping[str, Any],
        quantization: Mapping[str, Any],
        path: object,
    ) -> None:
        """Reads how everything is quantized.

        Args:
            files: Which open file holds which tensor.
            config: The config.json.
            quantization: Its ``quantization_config``.
            path: The folder, for messages.
        """
        super().__init__(files, config)
        self._bits: int = quantization.get("bits", quantization.get("w_bit", 4))
        self._group: int = quantization.get("group_size", quantization.get("q_group_size", 128))
        # Layers may have other bits and groups then, which their tensors' shapes tell.
        self._differ = any(quantization.get(key) for key in _OF_SINGLE_LAYERS)
        if self._bits not in self.all_bits:
            raise UnsupportedModelError(
                f"{path} is quantized with {self.method} to {self._bits!r} bits, but only "
                f"{' or '.join(map(str, self.all_bits))} are read: take the unquantized model"
            )
        if type(self._group) is not int or not (self._group == -1 or 0 < self._group < 2**20):
            raise UnsupportedModelError(
                f"{path} is quantized with {self.method} in groups of {self._group!r} weights, "
                "which is no size: take the unquantized model"
            )

    def holds(self, name: str) -> bool:
        """Whether a weight's integers are there."""
        return name.endswith(".weight") and self.stored(name) in self._files

    def format(self, name: str) -> WeightFormat | None:
        """Integers in groups of neighbours."""
        columns = self.shape(name)[1]
        codes = 4 if self._bits_of(name) <= 4 else 8
        return group_format(self.method, codes, columns, self._group_of(name, columns))

    def read(self, name: str) -> QuantizedWeight:
        """Codes, and scales with the minima that zeros make."""
        form = self.format(name)
        assert form is not None
        return grouped_weight(form, *self._parts(name))

    def _parts(
        self, name: str
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
        """Integers (in_features, out_features), and zeros and scales (groups, out_features)."""
        rows, columns = self.shape(name)
        groups = _count(columns, self._group_of(name, columns))
        scales = self._floats(name, "scales", (groups, rows))
        bits = self._bits_of(name)
        zeros = self._raw(name, "qzeros", _WORDS, (groups, rows * bits // 32))
        return self._integers(name, bits), self._zeros(zeros.view(np.int32), bits), scales

    @abstractmethod
    def _integers(self, name: str, bits: int) -> npt.NDArray[np.uint8]:
        """Integers (in_features, out_features)."""

    @abstractmethod
    def _zeros(self, words: npt.NDArray[np.int32], bits: int) -> npt.NDArray[np.uint8]:
        """Zeros (groups, out_features)."""

    def _bits_of(self, name: str) -> int:
        """Bits of a weight's integers: config.json's, or those that its zeros have."""
        if self._differ and self._has(name, "qzeros") and self._has(name, "scales"):
            words, numbers = (self._matrix(name, leaf)[1] for leaf in ("qzeros", "scales"))
            return next((b for b in self.all_bits if numbers * b == words * 32), self._bits)
        return self._bits

    def _group_of(self, name: str, columns: int) -> int:
        """Weights of a row that share a scale, or -1: config.json's, or as scales are there."""
        if self._differ and self._has(name, "scales"):
            groups = self._matrix(name, "scales")[0]
            if groups and groups != _count(columns, self._group) and columns % groups == 0:
                return -1 if groups == 1 else columns // groups
        return self._group

    def _words(self, name: str) -> npt.NDArray[np.int32]:
        return self._raw(name, self.codes_leaf, _WORDS).view(np.int32)

    def _words_shape(self, name: str) -> tuple[int, int]:
        return self._matrix(name, self.codes_leaf)


class AwqFiles(GroupFiles):
    """AWQ's "gemm" layout."""

    method = "AWQ"
    all_bits = (4,)

    def __init__(
        self,
        files: Mapping[str, SafetensorsFile],
        config: Mapping[str, Any],
        quantization: Mapping[str, Any],
        path: object,
    ) -> None:
        """As its class; other layouts are refused."""
        super().__init__(files, config, quantization, path)
        keys = ("version", "format", "checkpoint_format")
        layout = next((quantization[key] for key in keys if key in quantization), "gemm")
        if str(layout).lower() != "gemm":
            raise UnsupportedModelError(
                f"{path} is quantized with AWQ in its layout {brief(layout)}, but only gemm is "
                "read: take the unquantized model"
            )

    def shape(self, name: str) -> tuple[int, int]:
        """(8 · words of a row, rows of words)."""
        columns, words = self._words_shape(name)
        return 8 * words, columns

    def _integers(self, name: str, bits: int) -> npt.NDArray[np.uint8]:
        return unpack_awq(self._words(name))

    def _zeros(self, words: npt.NDArray[np.int32], bits: int) -> npt.NDArray[np.uint8]:
        return unpack_awq(words)


class GptqFiles(GroupFiles):
    """GPTQ's layout, of both versions.

    Where the columns of a group are no neighbours (``desc_act``), no kernel reads them.
    """

    method = "GPTQ"
    all_bits = (2, 3, 4, 8)

    def __init__(
        self,
        files: Mapping[str, SafetensorsFile],
        config: Mapping[str, Any],
        quantization: Mapping[str, Any],
        path: object,
    ) -> None:
        """As its class; the second version stores zeros as they are."""
        super().__init__(files, config, quantization, path)
        layout = quantization.get("checkpoint_format", "gptq")
        if layout not in _LAYOUTS or quantization.get("is_marlin_format"):
            raise UnsupportedModelError(
                f"{path} is quantized with GPTQ in its layout "
                f"{brief('marlin' if layout in _LAYOUTS else layout)}, but only "
                f"{' and '.join(_LAYOUTS)} are read: take the unquantized model"
            )
        self._less_one = layout == "gptq"

    def shape(self, name: str) -> tuple[int, int]:
        """(Columns of words, weights of a column of words)."""
        words, rows = self._words_shape(name)
        return rows, words * 32 // self._bits_of(name)

    def format(self, name: str) -> WeightFormat | None:
        """Integers in groups of neighbours, or None if columns are in another order."""
        return super().format(name) if self._order(name) is None else None

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        """(q - zero) · scale, each column's by its group."""
        order = self._order(name)
        if order is None:
            return super().float32(name)
        codes, zeros, scales = self._parts(name)
        values = codes.astype(np.float32) - zeros[order]
        values *= scales[order]
        return np.ascontiguousarray(values.T)

    def _order(self, name: str) -> npt.NDArray[np.int32] | None:
        """The group of each column, if they are no neighbours."""
        columns = self.shape(name)[1]
        if not self._has(name, "g_idx"):
            return None
        order = self._raw(name, "g_idx", ("I32", "I64"), (columns,)).astype(np.int32)
        group = self._group_of(name, columns)
        size = columns if group == -1 else group
        if (order == np.arange(columns) // size).all():
            return None
        if not ((order >= 0) & (order < -(-columns // size))).all():
            raise self._wrong(self._name(name, "g_idx"), "names groups that are not there")
        return order

    def _integers(self, name: str, bits: int) -> npt.NDArray[np.uint8]:
        words = np.ascontiguousarray(self._words(name).T)
        return np.ascontiguousarray(unpack(words, bits).T)

    def _zeros(self, words: npt.NDArray[np.int32], bits: int) -> npt.NDArray[np.uint8]:
        zeros = unpack(words, bits)
        return zeros + np.uint8(1) & np.uint8(2**bits - 1) if self._less_one else zeros


def _count(columns: int, group: int) -> int:
    return 1 if group == -1 else -(-columns // group)
