"""Integers of compressed-tensors: a byte each, or packed in words of 32 bits.

``X.weight`` is I8, or ``X.weight_packed`` I32 with ``X.weight_shape`` beside it; ``X.weight_scale``
and perhaps ``X.weight_zero_point`` have a number for each block.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.quantized.compressed_groups import CompressedGroups, Group
from qlora_wgpu.checkpoint.quantized.files import QuantizedFiles
from qlora_wgpu.checkpoint.safetensors_file import SafetensorsFile
from qlora_wgpu.quant import QuantizedWeight, WeightFormat
from qlora_wgpu.quant.safetensors_formats import byte_format, packed_format, scaled_weight, unpack
from qlora_wgpu.weight_format import WHOLE

_SCALE, _ZERO = "weight_scale", "weight_zero_point"
_PACKED, _SHAPE, _ORDER = "weight_packed", "weight_shape", "weight_g_idx"
_WORDS = ("I32", "U32")


class _IntegerFiles(QuantizedFiles):
    """What both have in common.

    Where the columns of a group are no neighbours (``actorder: group``), no kernel reads them.
    """

    companions = (_SCALE, _ZERO, _SHAPE, _ORDER)

    def __init__(
        self,
        files: Mapping[str, SafetensorsFile],
        config: Mapping[str, Any],
        groups: CompressedGroups,
    ) -> None:
        """Notes where tensors are.

        Args:
            files: Which open file holds which tensor.
            config: The config.json.
            groups: What it says of the layers.
        """
        super().__init__(files, config)
        self._groups = groups

    def format(self, name: str) -> WeightFormat | None:
        """Integers in the blocks that its scales' shape tells, or None if columns are shuffled."""
        return self._form(name) if self._order(name) is None else None

    def read(self, name: str) -> QuantizedWeight:
        """Codes, scales and zeros as stored."""
        form = self._form(name)
        scales = self._floats(name, _SCALE)
        zeros = self._zeros(name, scales.shape) if form.has_zeros else None
        return scaled_weight(form, self._codes(name), scales, zeros, self._dtype)

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        """(q - zero) · scale, each column's by its group."""
        order = self._order(name)
        if order is None:
            return super().float32(name)
        form, scales = self._form(name), self._floats(name, _SCALE)
        values: npt.NDArray[np.float32] = form.quant_map[self._codes(name)]
        if form.has_zeros:
            values -= self._zeros(name, scales.shape)[:, order]
        values *= scales[:, order]
        return values

    @abstractmethod
    def _codes(self, name: str) -> npt.NDArray[np.uint8]:
        """(out_features, in_features) as stored."""

    @abstractmethod
    def _zeros(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """What is subtracted from codes, for scales of a shape."""

    @abstractmethod
    def _form(self, name: str) -> WeightFormat:
        """Its form where columns are in order."""

    def _group(self, name: str) -> Group:
        """What config.json says of a weight.

        Raises:
            CheckpointError: If it says nothing.
        """
        group = self._groups.of(name.removesuffix(".weight"))
        if group is None:
            raise self._wrong(self.stored(name), "is in no group of quantization_config's")
        return group

    def _tile(self, name: str) -> tuple[int, int]:
        """Rows and columns that share a scale.

        Raises:
            CheckpointError: If there are not as many scales as there should be.
        """
        (rows, columns), scales = self.shape(name), self._shape_of(name, _SCALE)
        if int(np.prod(scales)) == 1:
            return WHOLE, WHOLE
        if scales in ((rows,), (rows, 1)):
            return 1, WHOLE
        tile = self._group(name).tile
        if scales != (-(-rows // tile[0]), -(-columns // tile[1])):
            raise self._wrong(
                self._name(name, _SCALE),
                f"has shape {scales}, which quantization_config does not say of a weight of "
                f"{rows} x {columns}",
            )
        return tile

    def _order(self, name: str) -> npt.NDArray[np.int32] | None:
        """The group of each column, if they are no neighbours."""
        if not self._has(name, _ORDER):
            return None
        columns, (_, size) = self.shape(name)[1], self._tile(name)
        order = self._raw(name, _ORDER, ("I32", "I64"), (columns,)).astype(np.int32)
        if (order == -1).any() or (order == np.arange(columns) // size).all():
            return None  # compressed-tensors takes a -1 as columns in order
        if not ((order >= 0) & (order < -(-columns // size))).all():
            raise self._wrong(self._name(name, _ORDER), "names groups that are not there")
        return order


class ByteFiles(_IntegerFiles):
    """A byte for each integer: ``int-quantized`` and ``naive-quantized``."""

    def holds(self, name: str) -> bool:
        """Whether a weight is of bytes and has scales."""
        file = self._files.get(name)
        return file is not None and file.dtype(name) == "I8" and self._has(name, _SCALE)

    def shape(self, name: str) -> tuple[int, int]:
        """Its tensor's."""
        return self._matrix(name, self.codes_leaf)

    def _form(self, name: str) -> WeightFormat:
        columns, has_zeros = self.shape(name)[1], self._has(name, _ZERO)
        return byte_format(self._tile(name), columns, has_zeros=has_zeros)

    def _codes(self, name: str) -> npt.NDArray[np.uint8]:
        return self._raw(name, self.codes_leaf, ("I8",), self.shape(name)).view(np.uint8)

    def _zeros(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        return self._raw(name, _ZERO, ("I8",), shape).astype(np.float32)


class PackedFiles(_IntegerFiles):
    """Integers of 1 to 8 bits in words of 32: ``pack-quantized``."""

    codes_leaf = _PACKED

    def holds(self, name: str) -> bool:
        """Whether a weight's words and scales are there."""
        stored = self.stored(name)
        file = self._files.get(stored)
        is_words = file is not None and file.dtype(stored) in _WORDS
        return name.endswith(".weight") and is_words and self._has(name, _SCALE)

    def shape(self, name: str) -> tuple[int, int]:
        """As ``X.weight_shape`` says, or as many columns as words hold."""
        rows, words = self._matrix(name, _PACKED)
        bits = self._group(name).bits
        if not self._has(name, _SHAPE):
            return rows, words * 32 // bits
        shape = self._raw(name, _SHAPE, ("I32", "I64"), (2,)).tolist()
        if shape[0] != rows or -(-shape[1] * bits // 32) != words:
            raise self._wrong(
                self._name(name, _SHAPE),
                f"is {shape[0]} x {shape[1]}, which {rows} rows of {words} words with integers of "
                f"{bits} bits do not hold",
            )
        return rows, shape[1]

    def _form(self, name: str) -> WeightFormat:
        bits, columns, has_zeros = (
            self._group(name).bits,
            self.shape(name)[1],
            self._has(name, _ZERO),
        )
        return packed_format(bits, self._tile(name), columns, has_zeros=has_zeros)

    def _codes(self, name: str) -> npt.NDArray[np.uint8]:
        words = self._raw(name, _PACKED, _WORDS).view(np.int32)
        return unpack(words, self._group(name).bits)[:, : self.shape(name)[1]]

    def _zeros(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """As stored: packed by columns, or a byte each where a tensor has one."""
        bits = self._group(name).bits
        if self._dtype_of(name, _ZERO) == "I8":
            zeros = self._raw(name, _ZERO, ("I8",), shape).astype(np.float32)
            return zeros + np.float32(2 ** (bits - 1))
        rows = self.shape(name)[0]
        stored = (-(-rows * bits // 32), int(np.prod(shape)) // rows)
        words = self._raw(name, _ZERO, _WORDS, stored).view(np.int32)
        return unpack(np.ascontiguousarray(words.T), bits)[:, :rows].T.astype(np.float32)
