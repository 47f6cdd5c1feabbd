"""Folders of compressed-tensors, as llm-compressor writes them: each layer in its group's form."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.quantized.compressed_groups import FP8, CompressedGroups
from qlora_wgpu.checkpoint.quantized.files import QuantizedFiles
from qlora_wgpu.checkpoint.quantized.float4_files import Mxfp4PackedFiles, Nvfp4Files
from qlora_wgpu.checkpoint.quantized.fp8_files import Fp8Files
from qlora_wgpu.checkpoint.quantized.integer_files import ByteFiles, PackedFiles
from qlora_wgpu.checkpoint.safetensors_file import SafetensorsFile
from qlora_wgpu.errors import UnsupportedModelError, brief
from qlora_wgpu.quant import QuantizedWeight, WeightFormat
from qlora_wgpu.weight_format import WHOLE

_CACHE_SCALES = (".q_scale", ".k_scale", ".v_scale", ".k_zero_point", ".v_zero_point")
_ACTIVATIONS = (
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "output_scale",
    "output_zero_point",
)


class CompressedFiles(QuantizedFiles):
    """A reader for each form; which one has a weight, the tensors' names and types tell."""

    def __init__(
        self,
        files: Mapping[str, SafetensorsFile],
        config: Mapping[str, Any],
        quantization: Mapping[str, Any],
        path: Path,
    ) -> None:
        """Reads how everything is quantized.

        Args:
            files: Which open file holds which tensor.
            config: The config.json.
            quantization: Its ``quantization_config``.
            path: The folder, for messages.

        Raises:
            CheckpointError: If a value is damaged.
            UnsupportedModelError: If weights are sparse, rotated, or in a form that is not read.
        """
        super().__init__(files, config)
        _refuse_transforms(path, quantization)
        groups = CompressedGroups(quantization, path)
        tiles = {group.tile for group in groups.all if group.kind == FP8} - _WHOLE_ROWS
        if len(tiles) > 1:
            raise UnsupportedModelError(
                f"{path}: groups of quantization_config differ in their block_structure, but only "
                "tiles of one size are read in FP8: take the unquantized model"
            )
        self._quantizes_more = groups.quantizes_more
        self._parts: tuple[QuantizedFiles, ...] = (
            PackedFiles(files, config, groups),
            ByteFiles(files, config, groups),
            Fp8Files(files, config, next(iter(tiles), None)),
            Mxfp4PackedFiles(files, config),
            Nvfp4Files(files, config),
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """That activations and the cache are not quantized, where config.json has them so."""
        if not self._quantizes_more:
            return ()
        return (
            "quantization_config also quantizes activations, or keys and values, for inference: "
            "here weights alone are quantized",
        )

    def holds(self, name: str) -> bool:
        """Whether any of the readers does."""
        return self._part(name) is not None

    def shape(self, name: str) -> tuple[int, int]:
        """As its reader says."""
        return self._reader(name).shape(name)

    def format(self, name: str) -> WeightFormat | None:
        """As its reader says."""
        return self._reader(name).format(name)

    def read(self, name: str) -> QuantizedWeight:
        """As its reader does."""
        return self._reader(name).read(name)

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        """As its reader has it."""
        return self._reader(name).float32(name)

    def stored(self, name: str) -> str:
        """The tensor with the codes of a weight."""
        part = self._part(name)
        return name if part is None else part.stored(name)

    def weight_of(self, tensor: str) -> str:
        """The weight whose codes a tensor holds, or the tensor's own name."""
        names = (part.weight_of(tensor) for part in self._parts)
        return next((name for name in names if name != tensor), tensor)

    def is_companion(self, tensor: str) -> bool:
        """Whether a tensor only belongs to a quantized weight, activation or cache."""
        if tensor.endswith(_CACHE_SCALES):
            return True
        stem, _, leaf = tensor.rpartition(".")
        if leaf in _ACTIVATIONS and self.holds(f"{stem}.weight"):
            return True
        return any(part.is_companion(tensor) for part in self._parts)

    def _part(self, name: str) -> QuantizedFiles | None:
        return next((part for part in self._parts if part.holds(name)), None)

    def _reader(self, name: str) -> QuantizedFiles:
        part = self._part(name)
        assert part is not None
        return part


_WHOLE_ROWS = {(1, WHOLE), (WHOLE, WHOLE)}


def _refuse_transforms(path: Path, quantization: Mapping[str, Any]) -> None:
    sparse = quantization.get("sparsity_config")
    kind = sparse.get("format", "dense") if isinstance(sparse, Mapping) and sparse else "dense"
    if kind != "dense":
        raise UnsupportedModelError(
            f"{path} is stored sparse by compressed-tensors ({brief(kind)}), but only dense "
            "weights are read: take the unquantized model"
        )
    if quantization.get("transform_config"):
        raise UnsupportedModelError(
            f"{path} has weights that compressed-tensors rotated (transform_config), which is not "
            "computed: take the unquantized model"
        )
