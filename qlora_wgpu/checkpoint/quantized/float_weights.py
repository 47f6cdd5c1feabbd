"""Weights in floats of 4 and 8 bits: NVFP4, MXFP4, and FP8 as DeepSeek's and Qwen's have it."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.quantized.coded_weight import CodedWeight, QuantizedFiles
from qlora_wgpu.checkpoint.stored_weight import Files
from qlora_wgpu.quant import QuantizedWeight, WeightFormat
from qlora_wgpu.quant.quantized_weight import E4M3, E8M0
from qlora_wgpu.quant.safetensors_formats import (
    FP8_MAPS,
    MXFP4,
    NVFP4,
    fp4_weight,
    fp8_format,
    scaled_weight,
)
from qlora_wgpu.weight_format import WHOLE

# ---- NVFP4 and MXFP4, by layers ------------------------------------------------------------------

_GROUP = 16
_EXPONENTS = ("U8", "F8_E8M0")
_NOT_A_NUMBER = 255


class Nvfp4Weight(CodedWeight):
    """Codes, a scale of 8 bits for each 16 of them, and a float32 scale of the tensor.

    compressed-tensors divides by the tensor's scale, ModelOpt multiplies by it.
    """

    codes_types = ("U8",)
    companions = ("weight_scale", "weight_global_scale", "weight_scale_2")
    format = NVFP4

    def __init__(self, files: Files, name: str, torch_dtype: str) -> None:
        """As its class; codes are ``X.weight_packed``, or X.weight."""
        super().__init__(files, name, torch_dtype)
        if self._has("weight_packed"):
            self.codes_leaf, self.tensor = "weight_packed", self._leaf("weight_packed")

    @property
    def shape(self) -> tuple[int, int]:
        """Two weights a byte."""
        shape = self._shape_of(self.codes_leaf)
        if len(shape) != 2 or 2 * shape[1] % _GROUP:
            raise self._wrong(
                self.codes_leaf, f"has shape {shape}, whose rows are not of whole blocks"
            )
        return shape[0], 2 * shape[1]

    def quantized(self) -> QuantizedWeight:
        """Codes and scales as stored, the tensor's scale in what the others stand for."""
        rows, columns = self.shape
        codes = self._raw(self.codes_leaf, ("U8",), (rows, columns // 2))
        blocks = self._raw("weight_scale", ("F8_E4M3",), (rows, columns // _GROUP))
        scale_map = self._scale_map()
        if not np.isfinite(scale_map)[blocks].all():
            raise self._wrong(self.codes_leaf, "has scales that are NaN or infinite")
        return fp4_weight(NVFP4, codes, blocks, scale_map)

    def _scale_map(self) -> npt.NDArray[np.float32]:
        divides = self._has("weight_global_scale")
        leaf = "weight_global_scale" if divides else "weight_scale_2"
        whole = self._floats(leaf).reshape(-1)
        if whole.size != 1:
            raise self._wrong(leaf, f"has {whole.size} numbers, not one")
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            scales: npt.NDArray[np.float32] = E4M3 / whole if divides else E4M3 * whole
        return scales


class Mxfp4Weight(CodedWeight):
    """``X.weight_packed`` with a power of two for each 32 codes: ``mxfp4-pack-quantized``."""

    codes_leaf = "weight_packed"
    codes_types = ("U8",)
    companions = ("weight_scale",)
    format = MXFP4

    @property
    def is_there(self) -> bool:
        """Whether codes are, and scales that are exponents."""
        return super().is_there and self._dtype_of("weight_scale") in _EXPONENTS

    @property
    def shape(self) -> tuple[int, int]:
        """Two weights a byte."""
        shape = rows, columns = self._matrix(self.codes_leaf)
        if 2 * columns % MXFP4.blocksize:
            raise self._wrong(
                self.codes_leaf, f"has shape {shape}, whose rows are not of whole blocks"
            )
        return rows, 2 * columns

    def quantized(self) -> QuantizedWeight:
        """Codes and scales as stored."""
        rows, columns = self.shape
        blocks = (rows, columns // MXFP4.blocksize)
        exponents = self._raw("weight_scale", _EXPONENTS, blocks)
        if (exponents == _NOT_A_NUMBER).any():
            raise self._wrong("weight_scale", "holds NaN, so it is damaged")
        return fp4_weight(MXFP4, self._raw(self.codes_leaf, ("U8",)), exponents, E8M0)


# ---- MXFP4 of experts ----------------------------------------------------------------------------

_WEIGHT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_TENSOR = re.compile(r"(.*\.experts)\.(gate_up|down)_proj_blocks")
_BLOCK = 32
EXPERT_SCALES = ("gate_up_proj_scales", "down_proj_scales")
"""How the names of tensors with experts' scales end."""


class Mxfp4ExpertWeight(CodedWeight):
    """An expert's matrix, a part of a tensor, as gpt-oss has them.

    ``P.experts.gate_up_proj_blocks`` is (experts, rows, blocks of a row, 16 bytes), with
    ``…_scales`` (experts, rows, blocks of a row) beside it. Rows of gate and up take turns. Each
    expert's matrices are weights of their own here: ``P.experts.3.gate_proj.weight``.
    """

    format = MXFP4

    def __init__(self, files: Files, name: str, torch_dtype: str) -> None:
        """As its class; of another name there is none."""
        super().__init__(files, name, torch_dtype)
        match = _WEIGHT.fullmatch(name)
        self._expert, self._kind = (0, "") if match is None else (int(match[2]), match[3])
        if match is not None:
            self._stem = match[1]
        self.codes_leaf = f"{'down' if self._kind == 'down' else 'gate_up'}_proj_blocks"
        self.tensor = self._leaf(self.codes_leaf)

    @property
    def is_there(self) -> bool:
        """Whether such a layer is, with so many experts."""
        if not self._kind or self.tensor not in self._files:
            return False
        shape = self._shape_of(self.codes_leaf)
        return len(shape) == 4 and self._expert < shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """Of one expert's gate, up or down."""
        shape = self._shape_of(self.codes_leaf)
        halves = 1 if self._kind == "down" else 2
        if len(shape) != 4 or shape[3] != _BLOCK // 2 or shape[1] % halves:
            raise self._wrong(
                self.codes_leaf, f"has shape {shape}, which is not that of experts' blocks"
            )
        return shape[1] // halves, shape[2] * _BLOCK

    def quantized(self) -> QuantizedWeight:
        """One expert's codes and scales as stored."""
        rows, columns = self.shape
        which = {"gate": slice(0, None, 2), "up": slice(1, None, 2), "down": slice(None)}
        part = self._expert, which[self._kind]
        blocks = self._bytes(self.codes_leaf)[part]
        leaf = self.codes_leaf.removesuffix("_blocks") + "_scales"
        shape, own = self._shape_of(self.codes_leaf)[:3], self._shape_of(leaf)
        if own != shape:
            raise self._wrong(leaf, f"has shape {own}, not {shape}")
        exponents = self._bytes(leaf)[part]
        if (exponents == _NOT_A_NUMBER).any():
            raise self._wrong(leaf, "holds NaN, so the model is damaged")
        return fp4_weight(MXFP4, blocks.reshape(rows, columns // 2), exponents, E8M0)

    def _bytes(self, leaf: str) -> npt.NDArray[np.uint8]:
        return self._raw(leaf, ("U8",))


class Mxfp4ExpertFiles(QuantizedFiles):
    """A folder of such experts."""

    def owner(self, tensor: str) -> CodedWeight | None:
        """The first of the weights whose codes a tensor holds."""
        match = _TENSOR.fullmatch(tensor)
        kind = "down" if match and match[2] == "down" else "gate"
        return None if match is None else self.find(f"{match[1]}.0.{kind}_proj.weight")


# ---- FP8 -----------------------------------------------------------------------------------------

POWERS_OF_TWO = ("F8_E8M0", "U8")
_FP8_SCALES = ("weight_scale_inv", "weight_scale")


class Fp8Weight(CodedWeight):
    """``X.weight`` in 8 bits times ``X.weight_scale`` or ``X.weight_scale_inv``.

    Scales are one for the tensor, one for each row, or one for each tile. The scales of activations
    are left: activations are not quantized here.
    """

    codes_types = tuple(FP8_MAPS)
    companions: tuple[str, ...] = _FP8_SCALES

    def __init__(
        self, files: Files, name: str, torch_dtype: str, *, tile: tuple[int, int] | None
    ) -> None:
        """As its class; ``tile`` is rows and columns that share a scale, where that is told."""
        super().__init__(files, name, torch_dtype)
        self._tile = tile
        self._scales = next((leaf for leaf in _FP8_SCALES if self._has(leaf)), "")
        self.companions = (self._scales, *_FP8_SCALES)  # the first of which it must have

    @property
    def format(self) -> WeightFormat:
        """FP8 with the tiles that the scales' shape tells."""
        rows, columns = self.shape
        scales, stored = self._shape_of(self._scales), self.stored_dtype
        if int(np.prod(scales)) == 1:
            return fp8_format(stored, (WHOLE, WHOLE))
        if scales in ((rows,), (rows, 1)):
            return fp8_format(stored, (1, WHOLE))
        form = fp8_format(stored, self._tile or (1, 1))
        assert form.block_rows is not None
        across, down = form.blocks_per_row(columns), -(-rows // form.block_rows)
        if self._tile is None or scales != (down, across):
            raise self._wrong(
                self._scales,
                f"has shape {scales}, which is no scale for each "
                f"{'row' if self._tile is None else f'{self._tile[0]} x {self._tile[1]} tile'} of "
                f"a weight of {rows} x {columns}",
            )
        return form

    def quantized(self) -> QuantizedWeight:
        """Codes and scales as stored."""
        form, shape = self.format, self.shape
        codes = self._raw(self.codes_leaf, self.codes_types, shape)
        if not np.isfinite(form.quant_map)[codes].all():
            raise self._wrong(self.codes_leaf, "holds NaN or infinity, so the model is damaged")
        return scaled_weight(form, codes, self._scale_values(), self.torch_dtype)

    def _scale_values(self) -> npt.NDArray[np.float32]:
        if self._dtype_of(self._scales) not in POWERS_OF_TWO:
            return self._floats(self._scales)
        values: npt.NDArray[np.float32] = E8M0[self._raw(self._scales, POWERS_OF_TWO)]
        if not np.isfinite(values).all():
            raise self._wrong(self._scales, "holds NaN, so the model is damaged")
        return values
