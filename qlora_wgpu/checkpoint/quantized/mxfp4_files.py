"""gpt-oss's folders: the experts of a layer together, in MXFP4.

``P.experts.gate_up_proj_blocks`` is (experts, rows, blocks of a row, 16 bytes), with
``…_scales`` (experts, rows, blocks of a row) beside it. Rows of gate and up take turns. Each
expert's matrices are weights of their own here: ``P.experts.3.gate_proj.weight``.
"""

from __future__ import annotations

import re

import numpy as np

from qlora_wgpu.checkpoint.quantized.files import QuantizedFiles
from qlora_wgpu.quant import QuantizedWeight, WeightFormat
from qlora_wgpu.quant.safetensors_formats import MXFP4, mxfp4

_WEIGHT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_BLOCK = 32
_NOT_A_NUMBER = 255


class Mxfp4Files(QuantizedFiles):
    """Experts' matrices, each a part of a tensor."""

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
