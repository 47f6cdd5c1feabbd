"""Folders with floats of 4 bits: NVFP4 of compressed-tensors and ModelOpt, MXFP4 of the first."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.quantized.files import QuantizedFiles
from qlora_wgpu.quant import QuantizedWeight, WeightFormat
from qlora_wgpu.quant.quantized_weight import E4M3
from qlora_wgpu.quant.safetensors_formats import MXFP4, NVFP4, mxfp4, nvfp4

_GROUP = 16
_EXPONENTS = ("U8", "F8_E8M0")
_NOT_A_NUMBER = 255


class Nvfp4Files(QuantizedFiles):
    """Codes, a scale of 8 bits for each 16 of them, and a float32 scale of the tensor.

    compressed-tensors divides by the tensor's scale, ModelOpt multiplies by it.
    """

    companions = (
        "weight_scale",
        "weight_global_scale",
        "weight_scale_2",
        "input_global_scale",
        "input_scale",
    )

    def holds(self, name: str) -> bool:
        """Whether codes and scales of a weight are there."""
        stored = self.stored(name)
        file = self._files.get(stored)
        return (
            name.endswith(".weight")
            and file is not None
            and file.dtype(stored) == "U8"
            and self._has(name, "weight_scale")
        )

    def stored(self, name: str) -> str:
        """``X.weight_packed``, or X.weight."""
        packed = self._name(name, "weight_packed")
        return packed if packed in self._files else name

    def weight_of(self, tensor: str) -> str:
        """The weight whose codes a tensor holds, or the tensor's own name."""
        name = f"{tensor.removesuffix('.weight_packed')}.weight"
        return name if tensor.endswith(".weight_packed") and self.holds(name) else tensor

    def shape(self, name: str) -> tuple[int, int]:
        """Two weights a byte."""
        stored = self.stored(name)
        shape = self._files[stored].shape(stored)
        if len(shape) != 2 or 2 * shape[1] % _GROUP:
            raise self._wrong(stored, f"has shape {shape}, whose rows are not of whole blocks")
        return shape[0], 2 * shape[1]

    def format(self, name: str) -> WeightFormat:
        """NVFP4."""
        return NVFP4

    def read(self, name: str) -> QuantizedWeight:
        """Codes and scales as stored, the tensor's scale in what the others stand for."""
        rows, columns = self.shape(name)
        stored = self.stored(name)
        codes = self._raw(name, stored.rpartition(".")[2], ("U8",), (rows, columns // 2))
        blocks = self._raw(name, "weight_scale", ("F8_E4M3",), (rows, columns // _GROUP))
        scale_map = self._scale_map(name)
        if not np.isfinite(scale_map)[blocks].all():
            raise self._wrong(stored, "has scales that are NaN or infinite")
        return nvfp4(codes, blocks, scale_map)

    def _scale_map(self, name: str) -> npt.NDArray[np.float32]:
        divides = self._has(name, "weight_global_scale")
        leaf = "weight_global_scale" if divides else "weight_scale_2"
        whole = self._floats(name, leaf).reshape(-1)
        if whole.size != 1:
            raise self._wrong(self._name(name, leaf), f"has {whole.size} numbers, not one")
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            scales: npt.NDArray[np.float32] = E4M3 / whole if divides else E4M3 * whole
        return scales


class Mxfp4PackedFiles(QuantizedFiles):
    """``X.weight_packed`` with a power of two for each 32 codes: ``mxfp4-pack-quantized``."""

    codes_leaf = "weight_packed"
    companions = ("weight_scale",)

    def holds(self, name: str) -> bool:
        """Whether codes of a weight are there, and scales that are exponents."""
        file = self._files.get(self.stored(name))
        return (
            name.endswith(".weight")
            and file is not None
            and self._has(name, "weight_scale")
            and file.dtype(self.stored(name)) == "U8"
            and self._dtype_of(name, "weight_scale") in _EXPONENTS
        )

    def shape(self, name: str) -> tuple[int, int]:
        """Two weights a byte."""
        rows, columns = self._matrix(name, self.codes_leaf)
        if 2 * columns % MXFP4.blocksize:
            shape = (rows, columns)
            raise self._wrong(
                self.stored(name), f"has shape {shape}, whose rows are not of whole blocks"
            )
        return rows, 2 * columns

    def format(self, name: str) -> WeightFormat:
        """MXFP4."""
        return MXFP4

    def read(self, name: str) -> QuantizedWeight:
        """Codes and scales as stored."""
        rows, columns = self.shape(name)
        blocks = (rows, columns // MXFP4.blocksize)
        exponents = self._raw(name, "weight_scale", _EXPONENTS, blocks)
        if (exponents == _NOT_A_NUMBER).any():
            raise self._wrong(self._name(name, "weight_scale"), "holds NaN, so it is damaged")
        return mxfp4(self._raw(name, self.codes_leaf, ("U8",)), exponents)
