"""Experts' matrices that files hold together, as transformers keeps them in memory.

``P.experts.gate_up_proj`` is (experts, 2 · rows, columns), gate above up, and
``P.experts.down_proj`` (experts, rows, columns), neither of them quantized. Each expert's matrices
are weights of their own here: ``P.experts.3.gate_proj.weight``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from qlora_wgpu.checkpoint.safetensors_file import SafetensorsFile
from qlora_wgpu.checkpoint.safetensors_format import FLOATS

_WEIGHT = re.compile(r"(.*\.experts)\.(0|[1-9]\d{0,5})\.(gate|up|down)_proj\.weight")
_STACK = re.compile(r"(.*\.experts)\.(gate_up|down)_proj")
_LEAVES = {"gate_up": ("gate", "up"), "down": ("down",)}

Part = tuple[int, slice]
"""An expert, and rows of its own."""


class ExpertStacks:
    """The stacks of a folder's files, by the names of their parts."""

    def __init__(self, files: Mapping[str, SafetensorsFile]) -> None:
        """Looks into the files' headers only."""
        self._files = files

    def find(self, name: str) -> tuple[str, Part] | None:
        """The stack that holds a weight, and where in it; None if there is none."""
        match = _WEIGHT.fullmatch(name)
        if match is None:
            return None
        at, expert, leaf = match[1], int(match[2]), match[3]
        kind = "down" if leaf == "down" else "gate_up"
        stack = f"{at}.{kind}_proj"
        shape = self._shape(stack)
        if shape is None or expert >= shape[0]:
            return None
        rows = shape[1] // len(_LEAVES[kind])
        first = rows * _LEAVES[kind].index(leaf)
        return stack, (expert, slice(first, first + rows))

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The dimensions of a weight that a stack holds; None if none does."""
        found = self.find(name)
        if found is None:
            return None
        stack, (_, rows) = found
        return rows.stop - rows.start, self._files[stack].shape(stack)[2]

    def parts_of(self, tensor: str) -> list[str]:
        """The weights that a stored tensor holds, in its order; none if it is no stack."""
        match, shape = _STACK.fullmatch(tensor), self._shape(tensor)
        if match is None or shape is None:
            return []
        leaves = _LEAVES[match[2]]
        return [f"{match[1]}.{i}.{leaf}_proj.weight" for i in range(shape[0]) for leaf in leaves]

    def _shape(self, stack: str) -> tuple[int, ...] | None:
        """A stack's dimensions; None if there is none of that name."""
        file = self._files.get(stack)
        if file is None or file.dtype(stack) not in FLOATS:
            return None
        shape = file.shape(stack)
        is_even = stack.endswith("down_proj") or (len(shape) == 3 and shape[1] % 2 == 0)
        return shape if len(shape) == 3 and is_even else None
