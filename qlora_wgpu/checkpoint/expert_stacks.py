"""Experts' matrices that files hold together, as transformers keeps them in memory.

``P.experts.gate_up_proj`` is (experts, 2 · rows, columns), gate above up, and
``P.experts.down_proj`` (experts, rows, columns), neither of them quantized. Each expert's matrices
are weights of their own here: ``P.experts.3.gate_proj.weight``.

Granite's files call the stacks ``P.input_linear.weight`` and ``P.output_linear.weight``. Those of
gpt-oss are transposed, columns of gate and up taking turns: (experts, columns, 2 · rows), with
``…_bias`` (experts, 2 · rows) beside them. Its published files have MXFP4 codes in their place,
``…_blocks``, whose parts ``Mxfp4ExpertWeight`` reads (``quantized/float_weights.py``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.safetensors_file import FLOATS
from qlora_wgpu.checkpoint.stored_weight import Files, FloatWeight

IN_TURNS = ("gpt_oss",)
"""Model types whose stacks are as gpt-oss's."""

_WEIGHT = re.compile(r"(.*\.experts)\.(0|[1-9]\d{0,5})\.(gate|up|down)_proj\.(weight|bias)")
_STACK = re.compile(r"(.*\.experts)\.(gate_up|down)_proj|(.*)\.(in|out)put_linear\.weight")
_GRANITE = {"gate_up": "input_linear.weight", "down": "output_linear.weight"}
_LEAVES = {"gate_up": ("gate", "up"), "down": ("down",)}
_BLOCKS = "_blocks"
_DIMENSIONS = {"weight": 3, "bias": 2}


@dataclass(frozen=True)
class ExpertStack:
    """A tensor that holds a matrix of all experts, be it of codes."""

    name: str  # the tensor's name where it is of floats
    parts: list[str]  # the weights that it holds, in its order
    experts: int
    in_turns: bool  # whether it is as gpt-oss's

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Its dimensions where it is of floats, and each of its parts of these."""
        together = rows * len(self.parts) // self.experts
        own = (columns, together) if self.in_turns else (together, columns)
        return self.experts, *own

    def joined(self, parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """The tensor of floats, of all its parts."""
        rows, columns = parts[0].shape
        shape = self.shape(rows, columns)
        if not self.in_turns:
            return np.concatenate(parts).reshape(shape)
        apart = np.stack(parts).reshape(self.experts, -1, rows, columns)  # experts, kinds, …
        return np.ascontiguousarray(apart.transpose(0, 3, 2, 1)).reshape(shape)


class ExpertStacks:
    """The stacks of a folder's files, by the names of their parts."""

    def __init__(self, files: Files, model_type: object = None) -> None:
        """Looks into the files' headers only."""
        self._files = files
        self._in_turns = model_type in IN_TURNS

    def find(self, name: str) -> FloatWeight | None:
        """A weight that a stack of floats holds."""
        match = _WEIGHT.fullmatch(name)
        if match is None or (match[4] == "bias" and not self._in_turns):
            return None
        at, expert, leaf = match[1], int(match[2]), match[3]
        kind = "down" if leaf == "down" else "gate_up"
        stack = f"{at}.{kind}_proj" + ("_bias" if match[4] == "bias" else "")
        if stack not in self._files:
            stack = f"{at.removesuffix('experts')}{_GRANITE[kind]}"
        count, place = len(_LEAVES[kind]), _LEAVES[kind].index(leaf)
        shape = self._shape(stack, _DIMENSIONS[match[4]], count)
        if shape is None or expert >= shape[0]:
            return None
        if self._in_turns:
            columns = *[slice(None)] * (len(shape) - 2), slice(place, None, count)
            return FloatWeight(self._files, name, stack, (expert, *columns), transposed=True)
        rows = shape[1] // count
        own = slice(rows * place, rows * (place + 1))
        return FloatWeight(self._files, name, stack, (expert, own))

    def stack(self, tensor: str) -> ExpertStack | None:
        """What a stored tensor holds; None if it is no stack."""
        is_packed = self._in_turns and tensor.endswith(_BLOCKS)
        name = tensor.removesuffix(_BLOCKS) if is_packed else tensor
        match = _STACK.fullmatch(name)
        if match is None or tensor not in self._files:
            return None
        at, kind = match[1], match[2]
        if at is None:
            at, kind = f"{match[3]}.experts", "gate_up" if match[4] == "in" else "down"
        leaves = _LEAVES[kind]
        shape = self._files[tensor].shape(tensor)
        if not (is_packed and shape) and self._shape(tensor, 3, len(leaves)) is None:
            return None
        parts = [f"{at}.{i}.{leaf}_proj.weight" for i in range(shape[0]) for leaf in leaves]
        return ExpertStack(name, parts, shape[0], self._in_turns)

    def _shape(self, stack: str, dimensions: int, halves: int) -> tuple[int, ...] | None:
        """A stack's dimensions; None if there is none of that name."""
        file = self._files.get(stack)
        if file is None or file.dtype(stack) not in FLOATS:
            return None
        shape = file.shape(stack)
        if len(shape) != dimensions or shape[-1 if self._in_turns else 1] % halves:
            return None
        return shape
