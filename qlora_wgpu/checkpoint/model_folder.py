"""A Hugging Face model folder: its configuration, and its weights one at a time."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint import hub
from qlora_wgpu.checkpoint.bitsandbytes import holds_4bit, is_4bit, read_4bit, read_4bit_format
from qlora_wgpu.checkpoint.json_file import read_json_object
from qlora_wgpu.checkpoint.safetensors_file import SafetensorsFile, nearest
from qlora_wgpu.checkpoint.weight_files import open_weights
from qlora_wgpu.checkpoint.weight_fingerprint import WeightFingerprint
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError, brief
from qlora_wgpu.files import is_there
from qlora_wgpu.quant import QuantizedWeight, WeightFormat


class ModelFolder:
    """An opened model folder. Headers are read and checked; a weight is read when asked for.

    Attributes:
        path: The folder.
        config: The contents of config.json.
    """

    def __init__(
        self, path: Path, config: dict[str, Any], files: dict[str, SafetensorsFile]
    ) -> None:
        """Puts a folder together from its parts; users call ``open``."""
        self.path = path
        self.config = config
        self._files = files
        self._fingerprint: WeightFingerprint | None = None

    @classmethod
    def open(cls, path_or_name: str | PathLike[str]) -> ModelFolder:
        """Opens a folder, or downloads a model of the Hugging Face hub if there is no such folder.

        Args:
            path_or_name: A path, or a hub name such as "HuggingFaceTB/SmolLM2-135M".

        Raises:
            CheckpointError: If there is no such model, or a file of it is missing or damaged.
            UnsupportedModelError: If its weights are quantized in a way that is not read.
        """
        path = _find(str(path_or_name), weights=True)
        config = _read_config(path)
        _check_quantization(path, config.get("quantization_config"))
        return cls(path, config, open_weights(path))

    @classmethod
    def without_weights(cls, path_or_name: str | PathLike[str]) -> ModelFolder:
        """Opens a folder for its config.json and its tokenizer; weights are not even downloaded.

        Raises:
            CheckpointError: If there is no such model or it has no config.json.
        """
        path = _find(str(path_or_name), weights=False)
        return cls(path, _read_config(path), {})

    @property
    def is_quantized(self) -> bool:
        """Whether any weight is stored quantized."""
        return holds_4bit(self._files)

    def names(self) -> list[str]:
        """All tensors as stored, companions of quantized weights included."""
        return list(self._files)

    def files(self) -> dict[str, list[str]]:
        """The names of the weight files, and the tensors that each of them holds."""
        tensors: dict[str, list[str]] = {}
        for name, file in self._files.items():
            tensors.setdefault(file.path.name, []).append(name)
        return tensors

    def dtype(self, name: str) -> str:
        """A tensor's element type as stored, by safetensors' name, for example "BF16"."""
        return self._file(name).dtype(name)

    def raw(self, name: str) -> npt.NDArray[Any]:
        """A tensor's elements as stored; bfloat16 as uint16."""
        return self._file(name).raw(name)

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's dimensions as stored, which for 4-bit weights are those of their bytes."""
        return self._file(name).shape(name)

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor that is not quantized, as float32.

        Raises:
            CheckpointError: If there is no such tensor, it is no floating-point tensor, or not
                finite.
            UnsupportedModelError: If it is quantized in a way that is not read.
        """
        file = self._file(name)
        if is_4bit(self._files, name):
            raise CheckpointError(f"{file.path}: {name!r} is stored in 4 bits, not as floats")
        array = file.float32(name)
        # Both are NaN if any element is, and no temporary array is needed.
        if array.size and not (np.isfinite(array.min()) and np.isfinite(array.max())):
            raise CheckpointError(
                f"{file.path}: tensor {name!r} holds NaN or infinity, so the model is damaged"
            )
        return array

    def quantized(self, name: str) -> QuantizedWeight | None:
        """A weight as it is stored, or None if it is not quantized.

        Raises:
            CheckpointError: If there is no such tensor, or a companion is missing or damaged.
            UnsupportedModelError: If it is quantized in a way that is not read.
        """
        self._file(name)
        return read_4bit(self._files, name)

    def weight_format(self, name: str) -> WeightFormat | None:
        """The format of ``quantized(name)``, without reading it; None if it is not quantized.

        Raises:
            CheckpointError: If what the file says of it is damaged.
        """
        return read_4bit_format(self._files, name)

    def start_fingerprint(self) -> None:
        """Hashes weights while they are read from now on, so that ``fingerprint`` costs little."""
        self._fingerprint = self._fingerprint or WeightFingerprint(self._files)

    def finish_fingerprint(self) -> None:
        """Hashes, in a thread, what has not been read; reading no longer counts."""
        self.start_fingerprint()
        assert self._fingerprint is not None
        self._fingerprint.finish()

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """The model's identity: hashes of config.json and of all weights; waits for them."""
        self.finish_fingerprint()
        assert self._fingerprint is not None
        config = json.dumps(self.config, sort_keys=True).encode()
        return {
            "config": hashlib.sha256(config).hexdigest(),
            "weights": self._fingerprint.hexdigest,
        }

    def _file(self, name: str) -> SafetensorsFile:
        try:
            return self._files[name]
        except KeyError:
            raise CheckpointError(
                f"{self.path}: the checkpoint has no tensor {name!r}{nearest(name, self.names())}"
            ) from None


def _find(text: str, *, weights: bool) -> Path:
    path = Path(text).expanduser()
    if text and path.is_dir():
        return path
    if text and path.exists():
        raise CheckpointError(f"{path} is a file: give the folder that holds the model")
    if hub.is_hub_name(text):
        return hub.download(text, weights=weights)
    raise CheckpointError(f"there is no model folder {text!r}")


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not is_there(file):
        if (path / "adapter_config.json").exists():
            raise CheckpointError(
                f"{path} holds a PEFT adapter, not a model: give the folder of its base model"
            )
        raise CheckpointError(f"{path} has no config.json, so it is no Hugging Face model folder")
    return read_json_object(file)


def _check_quantization(path: Path, quantization: Any) -> None:
    if quantization is None:
        return
    if not isinstance(quantization, dict):
        raise CheckpointError(
            f"{path / 'config.json'}: quantization_config must be an object, got "
            f"{brief(quantization)}"
        )
    method = quantization.get("quant_method", "bitsandbytes")
    if method != "bitsandbytes":
        name = brief(method).strip("'")
        raise UnsupportedModelError(
            f"{path} is quantized with {name}, but only bitsandbytes' NF4 is "
            "read: take the unquantized model"
        )
    if quantization.get("load_in_8bit") or quantization.get("_load_in_8bit"):
        raise UnsupportedModelError(
            f"{path} is quantized to 8 bits (LLM.int8), but only bitsandbytes' NF4 is read: take "
            "the unquantized model"
        )
