"""A folder that bitsandbytes quantized, to 4 bits or to 8 (LLM.int8), layer by layer."""

from __future__ import annotations

import numpy as np

from qlora_wgpu.checkpoint.bitsandbytes import (
    has_4bit_state,
    read_4bit,
    read_4bit_dtype,
    read_4bit_format,
    read_4bit_shape,
)
from qlora_wgpu.checkpoint.quantized.files import STORED_AS, QuantizedFiles
from qlora_wgpu.quant import QuantizedWeight, WeightFormat
from qlora_wgpu.quant.safetensors_formats import INT8, of_bytes

_SCALES = "SCB"


class BitsAndBytesFiles(QuantizedFiles):
    """Weights with a state of 4 bits, or of type I8 with their rows' scales beside them."""

    companions = (_SCALES, "weight_format")

    def holds(self, name: str) -> bool:
        """Whether a weight has either."""
        return has_4bit_state(self._files, name) or self._is_int8(name)

    def shape(self, name: str) -> tuple[int, int]:
        """As its state says, or its tensor's."""
        if not self._is_int8(name):
            return read_4bit_shape(self._files, name)
        return self._matrix(name, self.codes_leaf)

    def format(self, name: str) -> WeightFormat | None:
        """NF4, FP4 or LLM.int8."""
        return INT8 if self._is_int8(name) else read_4bit_format(self._files, name)

    def read(self, name: str) -> QuantizedWeight:
        """Codes and scales as stored."""
        if not self._is_int8(name):
            return read_4bit(self._files, name)
        rows, columns = self.shape(name)
        if self._has(name, "weight_format") and self._raw(name, "weight_format", ("U8",)) != 0:
            raise self._wrong(
                self._name(name, "weight_format"), "says that columns are not in rows' order"
            )
        codes = self._raw(name, self.codes_leaf, ("I8",), (rows, columns)).view(np.uint8)
        return of_bytes(INT8, codes, self._floats(name, _SCALES, (rows,)), self._dtype)

    def is_mapped(self, name: str) -> bool:
        """Whether it is one of 4 bits."""
        return not self._is_int8(name)

    def read_mapped(self, name: str) -> QuantizedWeight:
        """Codes and scales as stored, in the file."""
        return read_4bit(self._files, name, mapped=True)

    def float_dtype(self, name: str) -> str:
        """As its state says."""
        if self._is_int8(name):
            return super().float_dtype(name)
        return STORED_AS[read_4bit_dtype(self._files, name)]

    def is_companion(self, tensor: str) -> bool:
        """Whether a tensor only belongs to a quantized weight."""
        weight, dot, _ = tensor.partition(".weight.")
        if dot and f"{weight}.weight" in self._files:
            return True
        return super().is_companion(tensor)

    def _is_int8(self, name: str) -> bool:
        file = self._files.get(name)
        return file is not None and file.dtype(name) == "I8" and self._has(name, _SCALES)
