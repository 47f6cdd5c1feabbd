"""A Hugging Face model folder: its configuration, and its weights one at a time."""

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
from qlora_wgpu.checkpoint.weight_fingerprint import WeightFingerprint, identity
from qlora_wgpu.config.yaml import read_json_object
from qlora_wgpu.errors import CheckpointError, brief
from qlora_wgpu.files import exists, is_dir, is_file, is_there
from qlora_wgpu.limits import INDEX_BYTES

# ---- weight files --------------------------------------------------------------------------------

_SHARD = re.compile(r"[^/\\\x00-\x1f\x7f]{1,240}\.safetensors")
_ONE_OF_SEVERAL = re.compile(r"-of-(?!0*1\.)\d+\.safetensors$")


def open_weights(folder: Path) -> dict[str, SafetensorsFile]:
    """Opens a model's weight files and says which of them holds which tensor.

    A single ``model.safetensors`` goes before an index, as in transformers.
    """
    if is_there(folder / WEIGHTS):
        file = SafetensorsFile(folder / WEIGHTS)
        return dict.fromkeys(file.names(), file)
    if is_there(folder / INDEX):
        return _open_shards(folder)
    raise CheckpointError(f"{folder} has no {WEIGHTS}{_what_it_has_instead(folder)}")


def _open_shards(folder: Path) -> dict[str, SafetensorsFile]:
    index = folder / INDEX
    weight_map = read_json_object(index, INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map that says which shard holds what")
    for name, shard in weight_map.items():
        # A shard lies in the folder itself: an index must not point anywhere else.
        if not isinstance(shard, str) or not _SHARD.fullmatch(shard):
            raise CheckpointError(
                f"{index} gives {brief(shard)} as the file of tensor {brief(name)}"
            )
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not is_there(folder / shard)]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {missing[0]} ({len(missing)} of {len(shards)} shards in {INDEX} are "
            "missing): download the model again"
        )
    files = {shard: SafetensorsFile(folder / shard) for shard in shards}
    for name, shard in weight_map.items():
        if name not in files[shard]:
            raise CheckpointError(
                f"{index} says that {shard} holds tensor {brief(name)}, but it does not: "
                "download the model again"
            )
    unlisted = {name: file for file in files.values() for name in file.names()}
    return unlisted | {name: files[shard] for name, shard in weight_map.items()}


def _what_it_has_instead(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir() if is_file(path))

    def first(*endings: str) -> str | None:
        return next((name for name in names if name.endswith(endings)), None)

    if "adapter_model.safetensors" in names or "adapter_config.json" in names:
        return ": it holds a PEFT adapter; give the folder of its base model"
    if other := first(".safetensors"):
        advice = "" if _ONE_OF_SEVERAL.search(other) else "rename it, or "
        return f" and no {INDEX}, only {other}: {advice}download the index"
    if other := first(".gguf"):
        return f", only {other}: name that file itself"
    if other := first(".bin", ".pth", ".pt", ".ckpt", ".pkl"):
        return (
            f", only {other}: PyTorch's pickles are not read; load the model with transformers and "
            "save_pretrained it, which writes safetensors"
        )
    if other := first(".h5", ".msgpack", ".onnx", ".npz"):
        return f", only {other}: take the model's safetensors version"
    return ": there are no weights in it"


# ---- the folder ----------------------------------------------------------------------------------

GGUF = ".gguf"


class ModelFolder:
    """An opened model folder. Headers are read and checked; a weight is read when asked for.

    Attributes:
        path: The folder.
        config: The contents of config.json.
    """

    _missing = "the checkpoint has no tensor"

    def __init__(self, path: Path, config: dict[str, Any], files: Files) -> None:
        """Puts a folder together from its parts; users call ``open``."""
        self.path = path
        self.config = config
        self._files = files
        self._quantized = (
            quantized_files(path, files, config) if files else QuantizedFiles(files, config)
        )
        self._stacks = ExpertStacks(files, config.get("model_type"))
        self._fingerprint: WeightFingerprint | None = None

    @classmethod
    def open(cls, path_or_name: str | PathLike[str]) -> ModelFolder:
        """Opens a folder, or downloads a model of the Hugging Face hub if there is no such folder.

        Args:
            path_or_name: A path, or a hub name such as "HuggingFaceTB/SmolLM2-135M".
        """
        path = _find(str(path_or_name), weights=True)
        if path.suffix == GGUF:
            return _gguf(path)
        config = _read_config(path)
        quantized_files(path, {}, config)  # refuses before weights are opened
        return cls(path, config, open_weights(path))

    @classmethod
    def without_weights(cls, path_or_name: str | PathLike[str]) -> ModelFolder:
        """Opens a folder for its config.json and its tokenizer; weights are not even downloaded."""
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
        """What quantization_config asks for and is not done, for the user to know."""
        return self._quantized.notes

    @property
    def text_folder(self) -> Path:
        """The folder of config.json, the tokenizer and the chat templates."""
        return self.path

    @property
    def parts_stacks(self) -> bool:
        """Whether experts are by themselves here, which Hugging Face's files hold together."""
        return False

    def names(self) -> list[str]:
        """All tensors as stored, companions of quantized weights included."""
        return list(self._files)

    def files(self) -> dict[str, list[str]]:
        """The names of the weight files, and the tensors that each of them holds."""
        tensors: dict[str, list[str]] = {}
        for name, file in self._files.items():
            tensors.setdefault(file.path.name, []).append(name)
        return tensors

    def find(self, name: str) -> StoredWeight | None:
        """A weight by its name: a quantized one, a tensor as it is, or a part of a stack."""
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
        """The weight that a stored tensor holds; None if it only belongs to a quantized one."""
        if tensor.endswith(self._quantized.unused):
            return None
        owner = self._quantized.owner(tensor)
        return self[tensor] if owner is None else owner if owner.tensor == tensor else None

    def stack(self, tensor: str) -> ExpertStack | None:
        """The weights that a stored tensor holds, where it is a stack of experts'."""
        return self._stacks.stack(tensor)

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

    @cached_property
    def identity(self) -> str | None:
        """Tells this folder's files from others and from other versions of themselves.

        config.json counts, and of the files names, sizes, times of change, headers and samples of
        the tensors: it is known at once, where ``fingerprint`` reads everything. None without
        files.
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
        raise CheckpointError(
            f"{path} is a file: give the folder that holds the model, or a {GGUF} file"
        )
    if hub.is_hub_model(text):
        return hub.download(text, weights=weights)
    if hub.is_hub_file(text):
        return hub.download_file(text)
    wanted = hub.owner_wanted(text)
    raise CheckpointError(f"there is no model folder {text!r}" + (wanted and f": {wanted}"))


def _gguf(path: Path) -> ModelFolder:
    from qlora_wgpu.gguf.folder import GGUFFolder  # which is a ModelFolder itself

    return GGUFFolder(GGUFFile(path))


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not is_there(file):
        if exists(path / "adapter_config.json"):
            raise CheckpointError(
                f"{path} holds a PEFT adapter, not a model: give the folder of its base model"
            )
        if exists(path / "adapter" / "adapter_config.json"):
            raise CheckpointError(
                f"{path} is a run's folder, not a model: give the folder of its base model, or "
                "what `merge` makes of the run"
            )
        if other := next(iter(sorted(path.glob(f"*{GGUF}"))), None):
            raise CheckpointError(f"{path} has no config.json: name the file {other} itself")
        raise CheckpointError(
            f"{path} has no config.json, so it is not a Hugging Face model folder"
        )
    return read_json_object(file)
