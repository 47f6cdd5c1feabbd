"""gpt-oss's folders: the experts of a layer together in one tensor, gate and up in one, too.

``P.experts.gate_up_proj`` is (experts, in_features, 2 · inner), its columns of gate and up taking
turns; ``P.experts.down_proj`` is (experts, inner, out_features); ``…_bias`` beside them are
(experts, ·). Each expert's are tensors of their own here: ``P.experts.3.gate_proj.weight``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.bfloat16 import from_bfloat16
from qlora_wgpu.checkpoint.safetensors_file import SafetensorsFile
from qlora_wgpu.checkpoint.safetensors_format import FLOATS
from qlora_wgpu.errors import CheckpointError

MODEL_TYPE = "gpt_oss"
_PART = re.compile(r"(.*\.experts)\.([0-9]{1,5})\.(gate|up|down)_proj\.(weight|bias)")
COLUMNS = {"gate": slice(0, None, 2), "up": slice(1, None, 2), "down": slice(None)}
"""Which columns of the whole are whose."""


@dataclass(frozen=True)
class ExpertPart:
    """One expert's matrix or bias, where ``SafetensorsFile`` has whole tensors.

    Attributes:
        file: The file of the whole.
        stored: The whole.
        expert: Which expert's.
        kind: gate, up or down.
        leaf: weight or bias.
    """

    file: SafetensorsFile
    stored: str
    expert: int
    kind: str
    leaf: str

    @property
    def path(self) -> Path:
        """The file's path."""
        return self.file.path

    def dtype(self, name: str) -> str:
        """The whole's element type."""
        return self.file.dtype(self.stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """(out_features, in_features), or (out_features) of a bias.

        Raises:
            CheckpointError: If the whole cannot be one.
        """
        shape = self.file.shape(self.stored)
        halves = 1 if self.kind == "down" else 2
        if len(shape) != (3 if self.leaf == "weight" else 2) or shape[-1] % halves:
            raise CheckpointError(
                f"{self.path}: {self.stored!r} has shape {shape}, which is not that of experts"
            )
        return (shape[-1] // halves, *shape[1:-1])

    def raw(self, name: str) -> npt.NDArray[Any]:
        """Its elements as stored, bfloat16 as uint16; errors as for ``shape``."""
        self.shape(name)
        own = self.file.raw(self.stored)[self.expert][..., COLUMNS[self.kind]]
        return np.ascontiguousarray(own.T)

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        """Its numbers.

        Raises:
            CheckpointError: If the whole cannot be experts', or holds no floats.
        """
        dtype = self.dtype(name)
        if dtype not in FLOATS:
            raise CheckpointError(f"{self.path}: {self.stored!r} has dtype {dtype}, not floats")
        raw = self.raw(name)
        with np.errstate(over="ignore"):
            return from_bfloat16(raw) if dtype == "BF16" else raw.astype(np.float32)


def stored_in(name: str) -> str | None:
    """The tensor that an expert's matrix or bias is a part of; None where it is none."""
    match = _PART.fullmatch(name)
    if match is None:
        return None
    stem = f"{match[1]}.{'down' if match[3] == 'down' else 'gate_up'}_proj"
    return stem if match[4] == "weight" else f"{stem}_bias"


def expert_part(
    files: Mapping[str, SafetensorsFile], config: Mapping[str, Any], name: str
) -> ExpertPart | None:
    """The part of that name; None where there is none.

    Args:
        files: Which open file holds which tensor.
        config: The config.json.
        name: The part's.
    """
    match, stored = _PART.fullmatch(name), stored_in(name)
    if config.get("model_type") != MODEL_TYPE or match is None or stored is None:
        return None
    if stored not in files:
        return None
    shape = files[stored].shape(stored)
    if not shape or int(match[2]) >= shape[0]:
        return None
    return ExpertPart(files[stored], stored, int(match[2]), match[3], match[4])
