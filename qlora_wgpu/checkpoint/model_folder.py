"""A Hugging Face model folder: its configuration, and its weights one at a time."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.bfloat16 import has_nonfinite
from qlora_wgpu.checkpoint import hub
from qlora_wgpu.checkpoint.bitsandbytes import refuse_unknown
from qlora_wgpu.checkpoint.expert_stacks import ExpertStacks
from qlora_wgpu.checkpoint.manifest import read_json_object
from qlora_wgpu.checkpoint.quantized import BitsAndBytesFiles, QuantizedFiles, quantized_files
from qlora_wgpu.checkpoint.safetensors_file import INDEX, WEIGHTS, SafetensorsFile, nearest
from qlora_wgpu.checkpoint.weight_fingerprint import WeightFingerprint, identity
from qlora_wgpu.errors import CheckpointError, brief
from qlora_wgpu.limits import INDEX_BYTES
from qlora_wgpu.mapped_files import let_go
from qlora_wgpu.presence import exists, is_dir, is_file, is_there
from qlora_wgpu.quant import QuantizedWeight, WeightFormat

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
_PIECE = 1 << 22  # numbers that are looked at a time


class ModelFolder:
    """An opened model folder. Headers are read and checked; a weight is read when asked for.

    Attributes:
        path: The folder.
        config: The contents of config.json.
        tells_shapes: Whether ``shape`` is a weight's own where it is quantized, too.
    """

    tells_shapes = False

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        files: dict[str, SafetensorsFile],
        quantized: QuantizedFiles | None = None,
    ) -> None:
        """Puts a folder together from its parts; users call ``open``."""
        self.path = path
        self.config = config
        self._files = files
        self._quantized_files = quantized or BitsAndBytesFiles(files, config)
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
        files = open_weights(path)
        return cls(path, config, files, quantized_files(path, files, config))

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
        return self._quantized_files.any

    @property
    def notes(self) -> tuple[str, ...]:
        """What quantization_config asks for and is not done, for the user to know."""
        return self._quantized_files.notes

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

    def dtype(self, name: str) -> str:
        """A tensor's element type as stored, by safetensors' name, for example "BF16"."""
        return self._file(name).dtype(self._tensor(name))

    def raw(self, name: str) -> npt.NDArray[Any]:
        """A tensor's elements as stored; bfloat16 as uint16."""
        tensor, part = self._place(name)
        array = self._file(name).raw(tensor)
        return self._stacks.oriented(array[part]) if part else array

    def has(self, name: str) -> bool:
        """Whether there is a tensor, or a quantized weight, or a part of a stack, of that name."""
        is_stored = name in self._files or self._quantized_files.holds(name)
        return is_stored or self._stacks.find(name) is not None

    def holds_quantized(self, name: str) -> bool:
        """Whether a weight is there and quantized."""
        return self._quantized_files.holds(name)

    def must_requantize(self, name: str) -> bool:
        """Whether a weight is quantized in a form that no kernel has; ``float32`` gives it."""
        return self._quantized_files.holds(name) and self._quantized_files.format(name) is None

    def weight_of(self, tensor: str) -> str:
        """The weight whose codes a stored tensor holds, or the tensor's own name."""
        return self._quantized_files.weight_of(tensor)

    def parts_of(self, tensor: str) -> list[str]:
        """The weights that a tensor holds, where it is a stack of experts', be it of codes."""
        return self._stacks.parts_of(tensor)

    def whole_stack(self, tensor: str) -> tuple[str, tuple[int, ...]]:
        """The name of such a tensor where it is of floats, and its dimensions there."""
        return self._stacks.whole(tensor, self.weight_shape(self.parts_of(tensor)[0]))

    def joined(self, tensor: str, parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """Such a tensor of floats, of the weights that it holds, in their order."""
        return self._stacks.joined(parts, self.whole_stack(tensor)[1])

    def is_companion(self, tensor: str) -> bool:
        """Whether a stored tensor only belongs to a quantized weight."""
        return self._quantized_files.is_companion(tensor)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's dimensions as stored, which for quantized weights are those of their codes."""
        tensor, part = self._place(name)
        own = self._stacks.shape(name) if part else None
        return own or self._file(name).shape(tensor)

    def weight_shape(self, name: str) -> tuple[int, ...]:
        """A tensor's dimensions, of a quantized weight those of the weight."""
        holds = self._quantized_files.holds(name)
        return self._quantized_files.shape(name) if holds else self.shape(name)

    def float_dtype(self, name: str) -> str:
        """A tensor's element type, of a quantized weight the one that it had before."""
        holds = self._quantized_files.holds(name)
        return self._quantized_files.float_dtype(name) if holds else self.dtype(name)

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor that is not quantized, or in a form that no kernel has, as float32."""
        file = self._file(name)
        if self._quantized_files.holds(name):
            if form := self._quantized_files.format(name):
                raise CheckpointError(f"{file.path}: {name!r} is stored as {form.name}, not floats")
            return self._quantized_files.float32(name)
        refuse_unknown(self._files, self._tensor(name))
        tensor, part = self._place(name)
        array = file.float32(tensor, part)
        array = self._stacks.oriented(array) if part else array
        return self._checked(name, array, file.path)

    def dequantized(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor as float32, quantized or not; errors as for ``float32`` and ``quantized``."""
        stored = self.quantized(name)
        return self.float32(name) if stored is None else stored.dequantize()

    def _checked(
        self, name: str, array: npt.NDArray[np.float32], path: Path
    ) -> npt.NDArray[np.float32]:
        """A tensor that is finite."""
        # Both are NaN if any element is, and no temporary array is needed.
        if array.size and not (np.isfinite(array.min()) and np.isfinite(array.max())):
            raise _damaged(path, name)
        return array

    def is_mapped(self, name: str) -> bool:
        """Whether ``quantized(name, mapped=True)`` leaves nearly all of a weight in its file."""
        return self._quantized_files.holds(name) and self._quantized_files.is_mapped(name)

    def quantized(self, name: str, *, mapped: bool = False) -> QuantizedWeight | None:
        """A weight as it is stored, or None if it is not quantized."""
        self._file(name)
        if self._quantized_files.holds(name):
            if not self._quantized_files.format(name):
                return None
            if mapped and self._quantized_files.is_mapped(name):
                return self._quantized_files.read_mapped(name)
            return self._quantized_files.read(name)
        refuse_unknown(self._files, self._tensor(name))
        return None

    def is_bfloat16(self, name: str) -> bool:
        """Whether a tensor of that name is there, stored as bfloat16."""
        return name in self._files and self._files[name].dtype(name) == "BF16"

    def bfloat16(self, name: str) -> npt.NDArray[np.uint16]:
        """The bits of a tensor that is stored as bfloat16: a read-only view of its file."""
        file = self._files[name]
        bits: npt.NDArray[np.uint16] = file.raw(name)
        flat = bits.reshape(-1)
        for begin in range(0, flat.size, _PIECE):
            piece = flat[begin : begin + _PIECE]
            if has_nonfinite(piece):
                raise _damaged(file.path, name)
            let_go(piece)
        return bits

    def weight_format(self, name: str) -> WeightFormat | None:
        """The format of ``quantized(name)``, without reading it; None if it is not quantized.

        A form that no kernel has is None, too: such a weight is quantized anew.
        """
        return self._quantized_files.format(name) if self._quantized_files.holds(name) else None

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

    def _tensor(self, name: str) -> str:
        """The stored tensor of that name, or with a weight of that name in it."""
        return self._place(name)[0]

    def _place(self, name: str) -> tuple[str, tuple[int | slice, ...]]:
        """A weight's stored tensor, and where in it the weight is: empty if it is all of it."""
        if self._quantized_files.holds(name):
            return self._quantized_files.stored(name), ()
        found = None if name in self._files else self._stacks.find(name)
        return found or (name, ())

    def _file(self, name: str) -> SafetensorsFile:
        try:
            return self._files[self._tensor(name)]
        except KeyError:
            raise CheckpointError(
                f"{self.path}: the checkpoint has no tensor {name!r}{nearest(name, self.names())}"
            ) from None


def _damaged(path: Path, name: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: tensor {name!r} holds NaN or infinity, so the model is damaged"
    )


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

    return GGUFFolder.of_path(path)


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
