"""Experts that a folder holds together in one tensor, put together again out of each one's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.checkpoint.expert_parts import COLUMNS, MODEL_TYPE
from qlora_wgpu.checkpoint.stream import Entry
from qlora_wgpu.export.folders import as_dtype

_BLOCKS = "_blocks"
_KINDS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}


@dataclass(frozen=True)
class ExpertStack:
    """gpt-oss's ``P.experts.gate_up_proj`` or ``down_proj``, (experts, in_features, columns).

    Attributes:
        name: The tensor's name where it is in floats.
        entry: Its type and shape there.
        at: ``P.experts``.
        kinds: What its columns are of, taking turns.
    """

    name: str
    entry: Entry
    at: str
    kinds: tuple[str, ...]

    @property
    def parts(self) -> list[str]:
        """The weights that it is made of."""
        experts = range(self.entry.shape[0])
        return [self.part(expert, kind) for expert in experts for kind in self.kinds]

    def part(self, expert: int, kind: str) -> str:
        """One expert's weight."""
        return f"{self.at}.{expert}.{kind}_proj.weight"

    def made(self, weight: Callable[[str], npt.NDArray[np.float32]]) -> npt.NDArray[np.generic]:
        """The tensor in its type, of what its parts have become."""
        whole = np.empty(
            self.entry.shape, as_dtype(np.empty(0, np.float32), self.entry.dtype).dtype
        )
        for expert in range(len(whole)):
            for kind in self.kinds:
                part = as_dtype(weight(self.part(expert, kind)), self.entry.dtype)
                whole[expert][:, COLUMNS[kind]] = part.T
        return whole


def stack_of(folder: ModelFolder, tensor: str) -> ExpertStack | None:
    """What a stored tensor becomes a part of; None of all that are no experts' weights.

    Args:
        folder: The model.
        tensor: A tensor as it is stored, in floats or as codes.
    """
    at, _, leaf = tensor.rpartition(".")
    kinds = _KINDS.get(leaf.removesuffix(_BLOCKS))
    is_experts = at.endswith(".experts") and folder.config.get("model_type") == MODEL_TYPE
    if kinds is None or not is_experts:
        return None
    first = f"{at}.0.{kinds[0]}_proj.weight"
    rows, columns = folder.weight_shape(first)
    shape = (folder.shape(tensor)[0], columns, rows * len(kinds))
    name = tensor.removesuffix(_BLOCKS)
    return ExpertStack(name, Entry(folder.float_dtype(first), shape), at, kinds)
