"""Experts' matrices that files hold together, as transformers keeps them in memory.

``P.experts.gate_up_proj`` is (experts, 2 · rows, columns), gate above up, and
``P.experts.down_proj`` (experts, rows, columns), neither of them quantized. Each expert's matrices
are weights of their own here: ``P.experts.3.gate_proj.weight``.

Granite's files call the stacks ``P.input_linear.weight`` and ``P.output_linear.weight``. Those of
gpt-oss are transposed, columns of gate and up taking turns: (experts, columns, 2 · rows), with
``…_bias`` (experts, 2 · rows) beside them. Its published files have MXFP4 codes in their place,
``…_blocks``, whose parts ``Mxfp4Files`` reads (``quantized/float_files.py``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.safetensors_file import FLOATS, SafetensorsFile

IN_TURNS = ("gpt_oss",)
"""Model types whose stacks are as gpt-oss's."""

_WEIGHT = re.compile(r"(.*\.experts)\.(0|[1-9]\d{0,5})\.(gate|up|down)_proj\.(weight|bias)")
_STACK = re.compile(r"(.*\.experts)\.(gate_up|down)_proj|(.*)\.(in|out)put_linear\.weight")
_GRANITE = {"gate_up": "input_linear.weight", "down": "output_linear.weight"}
_LEAVES = {"gate_up": ("gate", "up"), "down": ("down",)}
_BLOCKS = "_blocks"
_DIMENSIONS = {"weight": 3, "bias": 2}

Part = tuple[int | slice, ...]
"""An expert, and rows of its own, or columns."""


class ExpertStacks:
    """The stacks of a folder's files, by the names of their parts."""

    def __init__(self, files: Mapping[str, SafetensorsFile], model_type: object = None) -> None:
        """Looks into the files' headers only."""
        self._files = files
        self._in_turns = model_type in IN_TURNS

    def find(self, name: str) -> tuple[str, Part] | None:
        """The stack that holds a weight, and where in it; None if there is none.

        What lies there is the weight once it is ``oriented``.
        """
        match = _WEIGHT.fullmatch(name)
        if match is None or (match[4] == "bias" and not self._in_turns):
            return None
        at, expert, leaf = match[1], int(match[2]), match[3]
        kind = "down" if leaf == "down" else "gate_up"
        stack = f"{at}.{kind}_proj" + ("_bias" if match[4] == "bias" else "")
        if stack not in self._files:
            stack = f"{at.removesuffix('experts')}{_GRANITE[kind]}"
        shape = self._shape(stack, _DIMENSIONS[match[4]], len(_LEAVES[kind]))
        if shape is None or expert >= shape[0]:
            return None
        count, place = len(_LEAVES[kind]), _LEAVES[kind].index(leaf)
        if self._in_turns:
            return stack, (expert, *[slice(None)] * (len(shape) - 2), slice(place, None, count))
        rows = shape[1] // count
        return stack, (expert, slice(rows * place, rows * (place + 1)))

    def oriented(self, part: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """(out_features, in_features) of what lies where ``find`` says."""
        return np.ascontiguousarray(part.T) if self._in_turns else part

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The dimensions of a weight that a stack holds; None if none does."""
        found = self.find(name)
        if found is None:
            return None
        stack, (_, *own) = found
        sizes = [
            len(range(*places.indices(size)))
            for places, size in zip(own, self._files[stack].shape(stack)[1:], strict=False)
            if isinstance(places, slice)
        ]
        if self._in_turns:
            return tuple(reversed(sizes))
        return sizes[0], self._files[stack].shape(stack)[2]

    def parts_of(self, tensor: str) -> list[str]:
        """The weights that a stored tensor holds, in its order; none if it is no stack."""
        is_packed = self._in_turns and tensor.endswith(_BLOCKS)
        match = _STACK.fullmatch(tensor.removesuffix(_BLOCKS) if is_packed else tensor)
        if match is None or tensor not in self._files:
            return []
        at, kind = match[1], match[2]
        if at is None:
            at, kind = f"{match[3]}.experts", "gate_up" if match[4] == "in" else "down"
        leaves = _LEAVES[kind]
        shape = self._files[tensor].shape(tensor)
        if not (is_packed and shape) and self._shape(tensor, 3, len(leaves)) is None:
            return []
        return [f"{at}.{i}.{leaf}_proj.weight" for i in range(shape[0]) for leaf in leaves]

    def whole(self, tensor: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        """The name of a stack of floats in place of a stored one, and its dimensions.

        Args:
            tensor: The stored one, in floats or in codes.
            shape: (out_features, in_features) of one of its parts.
        """
        parts, (rows, columns) = self.parts_of(tensor), shape
        experts = self._files[tensor].shape(tensor)[0]
        together = rows * len(parts) // experts
        name = tensor.removesuffix(_BLOCKS) if self._in_turns else tensor
        return name, (experts, columns, together) if self._in_turns else (
            experts,
            together,
            columns,
        )

    def joined(self, parts: Sequence[npt.NDArray[Any]], shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """A stack of floats of these dimensions, of its parts."""
        if not self._in_turns:
            return np.concatenate(parts).reshape(shape)
        rows, columns = parts[0].shape
        apart = np.stack(parts).reshape(shape[0], -1, rows, columns)  # experts, kinds, …
        return np.ascontiguousarray(apart.transpose(0, 3, 2, 1)).reshape(shape)

    def _shape(self, stack: str, dimensions: int, halves: int) -> tuple[int, ...] | None:
        """A stack's dimensions; None if there is none of that name."""
        file = self._files.get(stack)
        if file is None or file.dtype(stack) not in FLOATS:
            return None
        shape = file.shape(stack)
        if len(shape) != dimensions or shape[-1 if self._in_turns else 1] % halves:
            return None
        return shape
