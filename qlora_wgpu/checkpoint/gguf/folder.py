"""A GGUF file in the place of a Hugging Face folder."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.expert_stacks import IN_TURNS
from qlora_wgpu.checkpoint.gguf.configs import find_architecture, read_config
from qlora_wgpu.checkpoint.gguf.element_types import QUANTIZED
from qlora_wgpu.checkpoint.gguf.file import GGUFFile
from qlora_wgpu.checkpoint.gguf.keys import Keys
from qlora_wgpu.checkpoint.gguf.names import placements
from qlora_wgpu.checkpoint.gguf.text_files import text_folder
from qlora_wgpu.checkpoint.gguf.weights import GGUFWeights
from qlora_wgpu.checkpoint.model_folder import ModelFolder
from qlora_wgpu.checkpoint.safetensors_file import nearest
from qlora_wgpu.checkpoint.safetensors_format import WEIGHTS
from qlora_wgpu.checkpoint.weight_fingerprint import WeightFingerprint, identity, state_of
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.quant import GGML_FORMATS, QuantizedWeight, repack_ggml
from qlora_wgpu.weight_format import WeightFormat


class GGUFFolder(ModelFolder):
    """An opened GGUF file: its header is read and checked, a weight is read when asked for.

    Attributes:
        path: The file, or the first of a split model's.
        config: What config.json would say.
        file: The open file.
        placements: Where each tensor lies in it, by Hugging Face's names.
    """

    tells_shapes = True

    def __init__(self, file: GGUFFile) -> None:
        """Takes an open file.

        Raises:
            CheckpointError: If what it says is wrong.
            UnsupportedModelError: If it is of an architecture, or says or holds something, that
                is not computed here.
        """
        config = read_config(file)
        super().__init__(file.path, config, {})
        self.file = file
        architecture = find_architecture(Keys(file.metadata, file.path))
        self.placements = placements(file, architecture, config)
        self._weights = GGUFWeights(file, self.placements)

    @classmethod
    def of_path(cls, path: Path) -> GGUFFolder:
        """Opens a file; any part of a split model names all; errors as for the constructor."""
        return cls(GGUFFile(path))

    @cached_property
    def text_folder(self) -> Path:
        """The folder with config.json and the tokenizer's files, made of the file's header."""
        return text_folder(self.file, self.config)

    @property
    def is_quantized(self) -> bool:
        """Whether any matrix is stored quantized."""
        return any(self._is_quantized(name) for name in self._weights.names())

    @property
    def parts_stacks(self) -> bool:
        """Whether experts are by themselves here, which Hugging Face's files hold together."""
        return self.config.get("model_type") in IN_TURNS

    def names(self) -> list[str]:
        """All tensors, by Hugging Face's names."""
        return self._weights.names()

    def files(self) -> dict[str, list[str]]:
        """All tensors in one file, as a folder that is made of this one has them."""
        return {WEIGHTS: self.names()}

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return name in self._weights

    def dtype(self, name: str) -> str:
        """A tensor's element type by llama.cpp's name, such as "F16" or "Q4_K"."""
        return self._known(name).dtype(name)

    def float_dtype(self, name: str) -> str:
        """The type of floats that a tensor becomes."""
        return self.dtype(name) if self._known(name).type(name).is_float else "BF16"

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's dimensions, whatever it is stored as."""
        return self._known(name).shape(name)

    def weight_shape(self, name: str) -> tuple[int, ...]:
        """``shape``."""
        return self.shape(name)

    def raw(self, name: str) -> npt.NDArray[Any]:
        """A tensor of floats as stored; bfloat16 as uint16."""
        return self._known(name).raw(name)

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor as float32, quantized ones as llama.cpp reads them.

        Raises:
            CheckpointError: If there is no such tensor, it holds no such numbers, or they are not
                finite.
        """
        return self._checked(name, self._known(name).float32(name), self.path)

    def dequantized(self, name: str) -> npt.NDArray[np.float32]:
        """``float32``, which takes all."""
        return self.float32(name)

    def quantized(self, name: str, *, mapped: bool = False) -> QuantizedWeight | None:
        """A matrix as it is stored; None of floats and of types that no kernel reads.

        Raises:
            CheckpointError: If there is no such tensor, or a scale is not finite.
        """
        weights = self._known(name)
        shape = weights.shape(name)
        if self.weight_format(name) is None:
            return None
        rows = np.ascontiguousarray(weights.rows(name)).reshape(-1)
        where = f"{self.path}: {name}"
        return repack_ggml(weights.dtype(name), rows, (shape[0], shape[1]), where)

    def weight_format(self, name: str) -> WeightFormat | None:
        """The format of ``quantized(name)``, without reading it."""
        weights = self._known(name)
        stored = GGML_FORMATS.get(weights.dtype(name))
        is_matrix = len(weights.shape(name)) == 2 and weights.keeps_bits(name)
        return stored.form if stored is not None and is_matrix else None

    def holds_quantized(self, name: str) -> bool:
        """Whether a weight is there and quantized."""
        return self.has(name) and self._is_quantized(name)

    def must_requantize(self, name: str) -> bool:
        """Whether a weight is of a type that no kernel has; ``float32`` gives it."""
        return self.holds_quantized(name) and self.weight_format(name) is None

    def weight_of(self, tensor: str) -> str:
        """The tensor's own name."""
        return tensor

    def is_companion(self, tensor: str) -> bool:
        """No: blocks hold their scales."""
        return False

    def start_fingerprint(self) -> None:
        """Hashes weights while they are read from now on, so that ``fingerprint`` costs little."""
        if self._fingerprint is None:
            self._fingerprint = WeightFingerprint(dict.fromkeys(self.names(), self._weights))

    @cached_property
    def identity(self) -> str | None:
        """``ModelFolder.identity``, of all parts and their headers."""
        about = [self.file.header_digest, *map(state_of, self.file.paths)]
        return identity([self._weights], json.dumps([self.config, about], sort_keys=True))

    def _is_quantized(self, name: str) -> bool:
        return self._weights.type(name).number in QUANTIZED

    def _known(self, name: str) -> GGUFWeights:
        if name not in self._weights:
            raise CheckpointError(
                f"{self.path}: the file has no tensor for {name!r}{nearest(name, self.names())}"
            )
        return self._weights
