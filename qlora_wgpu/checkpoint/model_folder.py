"""A Hugging Face model folder: config.json, and weights that are read on demand."""

from __future__ import annotations

import hashlib
import json
import re
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from qlora_wgpu.checkpoint import hub
from qlora_wgpu.checkpoint.gguf_file import GGUFFile
from qlora_wgpu.checkpoint.manifest import WeightFingerprint, identity
from qlora_wgpu.checkpoint.quantized import quantized_files
from qlora_wgpu.checkpoint.quantized.coded_weight import QuantizedFiles
from qlora_wgpu.checkpoint.safetensors_file import INDEX, WEIGHTS, SafetensorsFile, nearest
from qlora_wgpu.checkpoint.stored_weight import (
    ExpertStack,
    ExpertStacks,
    Files,
    FloatWeight,
    StoredWeight,
)
from qlora_wgpu.config.yaml import read_json_object
from qlora_wgpu.errors import CheckpointError, brief
from qlora_wgpu.files import exists, is_dir, is_file, is_there
from qlora_wgpu.limits import INDEX_BYTES

# ---- weight files --------------------------------------------------------------------------------

_SHARD = re.compile(r"[^/\\\x00-\x1f\x7f]{1,240}\.safetensors")
_ONE_OF_SEVERAL = re.compile(r"-of-(?!0*1\.)\d+\.safetensors$")


def open_weights(folder: Path) -> dict[str, SafetensorsFile]:
    """A model's open weight files by tensor; model.safetensors goes before an index."""
    if is_there(folder / WEIGHTS):
        file = SafetensorsFile(folder / WEIGHTS)
        return dict.fromkeys(file.names(), file)
    if is_there(folder / INDEX):
        return _open_shards(folder)
    raise CheckpointError(f"{folder} has no {WEIGHTS}{_hint(folder)}")


def _open_shards(folder: Path) -> dict[str, SafetensorsFile]:
    index = folder / INDEX
    weight_map = read_json_object(index, INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map with the shard of each tensor")
    for name, shard in weight_map.items():
        # An index must not point outside its folder.
        if not isinstance(shard, str) or not _SHARD.fullmatch(shard):
            raise CheckpointError(
                f"{index}: the shard of tensor {brief(name)} must be a file name ending in "
                f".safetensors, got {brief(shard)}"
            )
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not is_there(folder / shard)]
    if missing:
        raise CheckpointError(
            f"{missing[0]} is missing from {folder} ({len(missing)} of {len(shards)} shards of "
            f"{INDEX} are missing): download the model again"
        )
    files = {shard: SafetensorsFile(folder / shard) for shard in shards}
    for name, shard in weight_map.items():
        if name not in files[shard]:
            raise CheckpointError(
                f"tensor {brief(name)} is missing from {shard}, where {index} expects it: download "
                "the model again"
            )
    unlisted = {name: file for file in files.values() for name in file.names()}
    return unlisted | {name: files[shard] for name, shard in weight_map.items()}


def _hint(folder: Path) -> str:
    """The end of a message about missing weights: what the folder has instead, and what to do."""
    names = sorted(path.name for path in folder.iterdir() if is_file(path))

    def first(*endings: str) -> str | None:
        return next((name for name in names if name.endswith(endings)), None)

    if "adapter_model.safetensors" in names or "adapter_config.json" in names:
        return ": it is a PEFT adapter; use the folder of its base model"
    if other := first(".safetensors"):
        advice = "" if _ONE_OF_SEVERAL.search(other) else "rename it, or "
        return f" and no {INDEX}, only {other}: {advice}download the index"
    if other := first(".gguf"):
        return f", only {other}: use the path of that file"
    if other := first(".bin", ".pth", ".pt", ".ckpt", ".pkl"):
        return (
            f", only {other}: PyTorch pickles are not supported; load the model with transformers "
            "and call save_pretrained, which writes safetensors"
        )
    if other := first(".h5", ".msgpack", ".onnx", ".npz"):
        return f", only {other}: use the model's safetensors version"
    return ": it has no weights"


# ---- the folder ----------------------------------------------------------------------------------

GGUF = ".gguf"


class ModelFolder:
    """An opened model folder. Headers are read and checked; weights are read on demand.

    Attributes:
        path: The folder.
        config: The contents of config.json.
    """

    _missing = "the checkpoint has no tensor"

    def __init__(self, path: Path, config: dict[str, Any], files: Files) -> None:
        """Use ``open`` instead."""
        self.path = path
        self.config = config
        self._files = files
        self._quantized = (
            quantized_files(path, files, config) if files else QuantizedFiles(files, config)
        )
        self._stacks = ExpertStacks(files, config)
        self._fingerprint: WeightFingerprint | None = None

    @classmethod
    def open(cls, path_or_name: str | PathLike[str]) -> ModelFolder:
        """Opens a folder or a GGUF file, or downloads a model from the Hugging Face Hub.

        Args:
            path_or_name: A path, or a Hub name such as "HuggingFaceTB/SmolLM2-135M".
        """
        path = _find(str(path_or_name), weights=True)
        if path.suffix == GGUF:
            return _gguf(path)
        config = _read_config(path)
        quantized_files(path, {}, config)  # raises before weights are opened
        return cls(path, config, open_weights(path))

    @classmethod
    def without_weights(cls, path_or_name: str | PathLike[str]) -> ModelFolder:
        """Opens a folder for its config.json and its tokenizer, without downloading weights."""
        path = _find(str(path_or_name), weights=False)
        if path.suffix == GGUF:
            return _gguf(path)
        return cls(path, _read_config(path), {})

    @property
    def is_quantized(self) -> bool:
        """Whether any weight is stored quantized."""
        return any(self._quantized.owner(tensor) is not None for tensor in self._files)

    @property
    def notes(self) -> tuple[str, ...]:
        """What quantization_config requires and is ignored, for the user."""
        return self._quantized.notes

    @property
    def text_folder(self) -> Path:
        """The folder of config.json, the tokenizer and the chat templates."""
        return self.path

    @property
    def splits_experts(self) -> bool:
        """Whether experts are separate tensors here, which Hugging Face's files stack."""
        return False

    def names(self) -> list[str]:
        """All stored tensors, including those that belong to quantized weights."""
        return list(self._files)

    def files(self) -> dict[str, list[str]]:
        """The names of the weight files, and the tensors in each of them."""
        tensors: dict[str, list[str]] = {}
        for name, file in self._files.items():
            tensors.setdefault(file.path.name, []).append(name)
        return tensors

    def find(self, name: str) -> StoredWeight | None:
        """A weight by its name: quantized, a plain tensor, or a part of a stack of experts."""
        quantized = self._quantized.find(name)
        if quantized is not None or name not in self._files:
            return quantized or self._stacks.find(name)
        return FloatWeight(self._files, name, name)

    def __getitem__(self, name: str) -> StoredWeight:
        weight = self.find(name)
        if weight is None:
            raise CheckpointError(
                f"{self.path}: {self._missing} {name!r}{nearest(name, self.names())}"
            )
        return weight

    def __contains__(self, name: str) -> bool:
        return self.find(name) is not None

    def weight_in(self, tensor: str) -> StoredWeight | None:
        """The weight in a stored tensor; None if it only belongs to a quantized weight."""
        if tensor.endswith(self._quantized.unused):
            return None
        owner = self._quantized.owner(tensor)
        return self[tensor] if owner is None else owner if owner.tensor == tensor else None

    def stack(self, tensor: str) -> ExpertStack | None:
        """The weights in a stored tensor, if it is a stack of experts."""
        return self._stacks.stack(tensor)

    def start_fingerprint(self) -> None:
        """Hashes weights while they are read, so that ``fingerprint`` is cheap."""
        self._fingerprint = self._fingerprint or WeightFingerprint(self._files)

    def finish_fingerprint(self) -> None:
        """Hashes what has not been read, in a thread."""
        self.start_fingerprint()
        assert self._fingerprint is not None
        self._fingerprint.finish()

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """Hashes of config.json and of all weights; waits until they are read."""
        self.finish_fingerprint()
        assert self._fingerprint is not None
        config = json.dumps(self.config, sort_keys=True).encode()
        return {
            "config": hashlib.sha256(config).hexdigest(),
            "weights": self._fingerprint.hexdigest,
        }

    @cached_property
    def identity(self) -> str | None:
        """A hash that changes with the folder's files, and is fast, unlike ``fingerprint``.

        It covers config.json, and the files' names, sizes, modification times, headers and samples
        of the tensors. None without files.
        """
        if not self._files:
            return None
        return identity(self._files.values(), json.dumps(self.config, sort_keys=True))


def _find(text: str, *, weights: bool) -> Path:
    path = Path(text).expanduser()
    if text and is_dir(path):
        return path
    if text and exists(path):
        if path.suffix == GGUF:
            return path
        raise CheckpointError(f"{path} is a file: a model must be a folder or a {GGUF} file")
    if hub.is_hub_model(text):
        return hub.download(text, weights=weights)
    if hub.is_hub_file(text):
        return hub.download_file(text)
    hint = hub.owner_hint(text)
    raise CheckpointError(f"model folder {text!r} does not exist" + (hint and f": {hint}"))


def _gguf(path: Path) -> ModelFolder:
    from qlora_wgpu.gguf.folder import GGUFFolder  # imports this module

    return GGUFFolder(GGUFFile(path))


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not is_there(file):
        if exists(path / "adapter_config.json"):
            raise CheckpointError(
                f"{path} is a PEFT adapter, not a model: use the folder of its base model"
            )
        if exists(path / "adapter" / "adapter_config.json"):
            raise CheckpointError(
                f"{path} is a run's folder, not a model: use the folder of its base model, or of "
                "its merged model (`merge`)"
            )
        if other := next(iter(sorted(path.glob(f"*{GGUF}"))), None):
            raise CheckpointError(f"{path} has no config.json: use the path of the file, {other}")
        raise CheckpointError(
            f"{path} has no config.json, so it is not a Hugging Face model folder"
        )
    return read_json_object(file)
