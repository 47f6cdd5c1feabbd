"""Folders with floats of 4 and 8 bits: NVFP4, MXFP4, and FP8 as DeepSeek's and Qwen's have it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.quantized.files import QuantizedFiles
from qlora_wgpu.checkpoint.safetensors_file import SafetensorsFile
from qlora_wgpu.quant import QuantizedWeight, WeightFormat
from qlora_wgpu.quant.quantized_weight import E4M3, E8M0
from qlora_wgpu.quant.safetensors_formats import (
    FP8_MAPS,
    MXFP4,
    NVFP4,
    fp8_format,
    mxfp4,
    nvfp4,
    of_bytes,
)
from qlora_wgpu.weight_format import WHOLE

# ---- NVFP4 and MXFP4, by layers ------------------------------------------------------------------

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


# ---- MXFP4 of experts ----------------------------------------------------------------------------

_WEIGHT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_BLOCK = 32


class Mxfp4Files(QuantizedFiles):
    """Experts' matrices, each a part of a tensor, as gpt-oss has them.

    ``P.experts.gate_up_proj_blocks`` is (experts, rows, blocks of a row, 16 bytes), with
    ``…_scales`` (experts, rows, blocks of a row) beside it. Rows of gate and up take turns. Each
    expert's matrices are weights of their own here: ``P.experts.3.gate_proj.weight``.
    """

    companions = ("gate_up_proj_scales", "down_proj_scales")

    def holds(self, name: str) -> bool:
        """Whether such a layer is there, with so many experts."""
        match = _WEIGHT.fullmatch(name)
        if match is None or self.stored(name) not in self._files:
            return False
        shape = self._files[self.stored(name)].shape(self.stored(name))
        return len(shape) == 4 and int(match[2]) < shape[0]

    def stored(self, name: str) -> str:
        """The tensor with all experts' codes."""
        stem, _, kind = self._parts(name)
        return f"{stem}.{'down' if kind == 'down' else 'gate_up'}_proj_blocks"

    def weight_of(self, tensor: str) -> str:
        """The tensor's own name: it holds many weights."""
        return tensor

    def is_companion(self, tensor: str) -> bool:
        """Whether a tensor holds scales."""
        return tensor.endswith(self.companions)

    def shape(self, name: str) -> tuple[int, int]:
        """Of one expert's gate, up or down."""
        stored = self.stored(name)
        shape = self._files[stored].shape(stored)
        _, _, kind = self._parts(name)
        halves = 1 if kind == "down" else 2
        if len(shape) != 4 or shape[3] != _BLOCK // 2 or shape[1] % halves:
            raise self._wrong(stored, f"has shape {shape}, which is not that of experts' blocks")
        return shape[1] // halves, shape[2] * _BLOCK

    def format(self, name: str) -> WeightFormat:
        """MXFP4."""
        return MXFP4

    def read(self, name: str) -> QuantizedWeight:
        """One expert's codes and scales as stored."""
        rows, columns = self.shape(name)
        _, expert, kind = self._parts(name)
        which = {"gate": slice(0, None, 2), "up": slice(1, None, 2), "down": slice(None)}[kind]
        blocks = self._tensor(self.stored(name))[expert, which]
        tensor = self.stored(name).removesuffix("_blocks") + "_scales"
        shape = self._files[self.stored(name)].shape(self.stored(name))[:3]
        if tensor not in self._files:
            raise self._wrong(self.stored(name), f"is quantized, but {tensor!r} is missing")
        if self._files[tensor].shape(tensor) != shape:
            raise self._wrong(tensor, f"has shape {self._files[tensor].shape(tensor)}, not {shape}")
        exponents = self._tensor(tensor)[expert, which]
        if (exponents == _NOT_A_NUMBER).any():
            raise self._wrong(tensor, "holds NaN, so the model is damaged")
        return mxfp4(blocks.reshape(rows, columns // 2), exponents)

    def _tensor(self, tensor: str) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        file = self._files[tensor]
        if file.dtype(tensor) != "U8":
            raise self._wrong(tensor, f"has dtype {file.dtype(tensor)}, not U8")
        return file.raw(tensor)

    @property
    def any(self) -> bool:
        """Whether any layer's experts are there."""
        return any(name.endswith("_proj_blocks") for name in self._files)

    def _parts(self, name: str) -> tuple[str, int, str]:
        match = _WEIGHT.fullmatch(name)
        assert match is not None
        return match[1], int(match[2]), match[3]


# ---- FP8 -----------------------------------------------------------------------------------------

POWERS_OF_TWO = ("F8_E8M0", "U8")


class Fp8Files(QuantizedFiles):
    """``X.weight`` in 8 bits times ``X.weight_scale`` or ``X.weight_scale_inv``.

    Scales are one for the tensor, one for each row, or one for each tile. The scales of activations
    are left: activations are not quantized here.
    """

    companions = ("weight_scale_inv", "weight_scale", "activation_scale", "input_scale")

    def __init__(
        self,
        files: Mapping[str, SafetensorsFile],
        config: Mapping[str, Any],
        tile: tuple[int, int] | None,
    ) -> None:
        """Notes where tensors are."""
        super().__init__(files, config)
        self._tile = tile

    def holds(self, name: str) -> bool:
        """Whether a weight is of 8-bit floats and has scales."""
        file = self._files.get(name)
        return file is not None and file.dtype(name) in FP8_MAPS and self._scales(name) is not None

    def shape(self, name: str) -> tuple[int, int]:
        """Its tensor's."""
        return self._matrix(name, self.codes_leaf)

    def format(self, name: str) -> WeightFormat:
        """FP8 with the tiles that the scales' shape tells."""
        rows, columns = self.shape(name)
        leaf = self._scales(name)
        assert leaf is not None
        scales = self._shape_of(name, leaf)
        stored = self._dtype_of(name, self.codes_leaf)
        if int(np.prod(scales)) == 1:
            return fp8_format(stored, (WHOLE, WHOLE))
        if scales in ((rows,), (rows, 1)):
            return fp8_format(stored, (1, WHOLE))
        form = fp8_format(stored, self._tile or (1, 1))
        assert form.block_rows is not None
        across, down = form.blocks_per_row(columns), -(-rows // form.block_rows)
        if self._tile is None or scales != (down, across):
            raise self._wrong(
                self._name(name, leaf),
                f"has shape {scales}, which is no scale for each "
                f"{'row' if self._tile is None else f'{self._tile[0]} x {self._tile[1]} tile'} of "
                f"a weight of {rows} x {columns}",
            )
        return form

    def read(self, name: str) -> QuantizedWeight:
        """Codes and scales as stored."""
        form, shape = self.format(name), self.shape(name)
        codes = self._raw(name, self.codes_leaf, tuple(FP8_MAPS), shape)
        if not np.isfinite(form.quant_map)[codes].all():
            raise self._wrong(name, "holds NaN or infinity, so the model is damaged")
        return of_bytes(form, codes, self._scale_values(name), self._dtype)

    def _scales(self, name: str) -> str | None:
        return next((leaf for leaf in self.companions[:2] if self._has(name, leaf)), None)

    def _scale_values(self, name: str) -> npt.NDArray[np.float32]:
        leaf = self._scales(name)
        assert leaf is not None
        if self._dtype_of(name, leaf) not in POWERS_OF_TWO:
            return self._floats(name, leaf)
        values: npt.NDArray[np.float32] = E8M0[self._raw(name, leaf, POWERS_OF_TWO)]
        if not np.isfinite(values).all():
            raise self._wrong(self._name(name, leaf), "holds NaN, so the model is damaged")
        return values
