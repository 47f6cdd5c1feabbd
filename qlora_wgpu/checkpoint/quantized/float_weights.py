"""Weights in 4-bit and 8-bit floats: NVFP4, MXFP4, and FP8."""

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

# ---- NVFP4 and MXFP4 -----------------------------------------------------------------------------

_EXPONENTS = ("U8", "F8_E8M0")
_NAN = 255


class _Fp4Weight(CodedWeight):
    """4-bit codes, two in a byte, in blocks of a row."""

    codes_types = ("U8",)
    block = MXFP4.blocksize

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        rows, pairs = self._matrix(self.codes_leaf)
        if 2 * pairs % self.block:
            raise self._error(
                self.codes_leaf,
                f"has rows of {2 * pairs} codes, which are not a multiple of {self.block}",
            )
        return rows, 2 * pairs

    def _exponents(self, leaf: str, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        exponents = self._raw(leaf, _EXPONENTS, shape)
        if (exponents == _NAN).any():
            raise self._error(leaf, "contains NaN: the model is damaged")
        return exponents


class Nvfp4Weight(_Fp4Weight):
    """4-bit codes with an FP8 scale for each 16, and a float32 scale of the tensor.

    compressed-tensors divides by the tensor's scale, ModelOpt multiplies by it.
    """

    companions = ("weight_scale", "weight_global_scale", "weight_scale_2")
    format = NVFP4
    block = NVFP4.blocksize

    def __init__(self, files: Files, name: str, torch_dtype: str) -> None:
        """Codes are ``X.weight_packed`` or ``X.weight``."""
        super().__init__(files, name, torch_dtype)
        if self._has("weight_packed"):
            self.codes_leaf, self.tensor = "weight_packed", self._leaf("weight_packed")

    def quantized(self) -> QuantizedWeight:
        """Codes and scales as stored, with the tensor's scale in the scales' map."""
        rows, columns = self.shape
        codes = self._raw(self.codes_leaf, ("U8",), (rows, columns // 2))
        blocks = self._raw("weight_scale", ("F8_E4M3",), (rows, columns // self.block))
        scale_map = self._scale_map()
        if not np.isfinite(scale_map)[blocks].all():
            raise self._error(self.codes_leaf, "has scales that are NaN or infinite")
        return fp4_weight(NVFP4, codes, blocks, scale_map)

    def _scale_map(self) -> npt.NDArray[np.float32]:
        divides = self._has("weight_global_scale")
        leaf = "weight_global_scale" if divides else "weight_scale_2"
        whole = self._floats(leaf).reshape(-1)
        if whole.size != 1:
            raise self._error(leaf, f"must have one number, got {whole.size}")
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            scales: npt.NDArray[np.float32] = E4M3 / whole if divides else E4M3 * whole
        return scales


class Mxfp4Weight(_Fp4Weight):
    """``X.weight_packed`` with an exponent for each 32 codes: ``mxfp4-pack-quantized``."""

    codes_leaf = "weight_packed"
    companions = ("weight_scale",)
    format = MXFP4

    @property
    def exists(self) -> bool:
        """Whether the files have codes and exponents."""
        return super().exists and self._dtype_of("weight_scale") in _EXPONENTS

    def quantized(self) -> QuantizedWeight:
        """Codes and scales as stored."""
        rows, columns = self.shape
        exponents = self._exponents("weight_scale", (rows, columns // self.block))
        return fp4_weight(MXFP4, self._raw(self.codes_leaf, ("U8",)), exponents, E8M0)


# ---- MXFP4 experts -------------------------------------------------------------------------------

_WEIGHT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_TENSOR = re.compile(r"(.*\.experts)\.(gate_up|down)_proj_blocks")
_BLOCK = 32
EXPERT_SCALES = ("gate_up_proj_scales", "down_proj_scales")
"""Endings of the names of tensors with experts' scales."""


class Mxfp4ExpertWeight(CodedWeight):
    """An expert's matrix in gpt-oss, a part of a tensor.

    ``P.experts.gate_up_proj_blocks`` is (experts, rows, blocks of a row, 16 bytes) and ``…_scales``
    (experts, rows, blocks of a row), with alternating rows of gate and up. Each expert's matrices
    are separate weights here: ``P.experts.3.gate_proj.weight``.
    """

    format = MXFP4

    def __init__(self, files: Files, name: str, torch_dtype: str) -> None:
        """The weight does not exist if ``name`` is not an expert's."""
        super().__init__(files, name, torch_dtype)
        match = _WEIGHT.fullmatch(name)
        self._expert, self._kind = (0, "") if match is None else (int(match[2]), match[3])
        if match is not None:
            self._stem = match[1]
        self.codes_leaf = f"{'down' if self._kind == 'down' else 'gate_up'}_proj_blocks"
        self.tensor = self._leaf(self.codes_leaf)

    @property
    def exists(self) -> bool:
        """Whether the layer exists and has this expert."""
        if not self._kind or self.tensor not in self._files:
            return False
        shape = self._shape_of(self.codes_leaf)
        return len(shape) == 4 and self._expert < shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of one expert's gate, up or down."""
        shape = self._shape_of(self.codes_leaf)
        halves = 1 if self._kind == "down" else 2
        if len(shape) != 4 or shape[3] != _BLOCK // 2 or shape[1] % halves:
            rows = "rows" if halves == 1 else "2 · rows"
            expected = f"(experts, {rows}, blocks, {_BLOCK // 2})"
            raise self._error(self.codes_leaf, f"must have shape {expected}, got {shape}")
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
            raise self._error(leaf, f"must have shape {shape}, got {own}")
        exponents = self._bytes(leaf)[part]
        if (exponents == _NAN).any():
            raise self._error(leaf, "contains NaN: the model is damaged")
        return fp4_weight(MXFP4, blocks.reshape(rows, columns // 2), exponents, E8M0)

    def _bytes(self, leaf: str) -> npt.NDArray[np.uint8]:
        return self._raw(leaf, ("U8",))


class Mxfp4ExpertFiles(QuantizedFiles):
    """A folder with such experts."""

    def owner(self, tensor: str) -> CodedWeight | None:
        """The first weight in a tensor of codes."""
        match = _TENSOR.fullmatch(tensor)
        kind = "down" if match and match[2] == "down" else "gate"
        return None if match is None else self.find(f"{match[1]}.0.{kind}_proj.weight")


# ---- FP8 -----------------------------------------------------------------------------------------

POWERS_OF_TWO = ("F8_E8M0", "U8")
_FP8_SCALES = ("weight_scale_inv", "weight_scale")


class Fp8Weight(CodedWeight):
    """``X.weight`` in FP8 times ``X.weight_scale`` or ``X.weight_scale_inv``.

    There is a scale for the tensor, each row, or each tile. Scales of activations are ignored.
    """

    codes_types = tuple(FP8_MAPS)
    companions: tuple[str, ...] = _FP8_SCALES

    def __init__(
        self, files: Files, name: str, torch_dtype: str, *, tile: tuple[int, int] | None
    ) -> None:
        """``tile`` is the rows and columns that share a scale, if config.json has it."""
        super().__init__(files, name, torch_dtype)
        self._tile = tile
        self._scales = next((leaf for leaf in _FP8_SCALES if self._has(leaf)), "")
        self.companions = (self._scales, *_FP8_SCALES)  # the first one is required

    @property
    def format(self) -> WeightFormat:
        """FP8, with tiles from the scales' shape."""
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
            block = "row" if self._tile is None else f"{self._tile[0]} x {self._tile[1]} tile"
            raise self._error(
                self._scales,
                f"must have a scale for each {block} of a weight of {rows} x {columns}, got shape "
                f"{scales}",
            )
        return form

    def quantized(self) -> QuantizedWeight:
        """Codes and scales as stored."""
        form, shape = self.format, self.shape
        codes = self._raw(self.codes_leaf, self.codes_types, shape)
        if not np.isfinite(form.quant_map)[codes].all():
            raise self._error(self.codes_leaf, "contains NaN or infinity: the model is damaged")
        return scaled_weight(form, codes, self._scale_values(), self.torch_dtype)

    def _scale_values(self) -> npt.NDArray[np.float32]:
        if self._dtype_of(self._scales) not in POWERS_OF_TWO:
            return self._floats(self._scales)
        values: npt.NDArray[np.float32] = E8M0[self._raw(self._scales, POWERS_OF_TWO)]
        if not np.isfinite(values).all():
            raise self._error(self._scales, "contains NaN: the model is damaged")
        return values
