"""Which safetensors files of a folder hold a model's weights."""

from __future__ import annotations

import re
from pathlib import Path

from qlora_wgpu.checkpoint.json_file import read_json_object
from qlora_wgpu.checkpoint.safetensors_file import SafetensorsFile
from qlora_wgpu.checkpoint.safetensors_format import INDEX, WEIGHTS
from qlora_wgpu.errors import CheckpointError, brief
from qlora_wgpu.limits import INDEX_BYTES
from qlora_wgpu.presence import is_file, is_there

_SHARD = re.compile(r"[^/\\\x00-\x1f\x7f]{1,240}\.safetensors")
_ONE_OF_SEVERAL = re.compile(r"-of-(?!0*1\.)\d+\.safetensors$")


def open_weights(folder: Path) -> dict[str, SafetensorsFile]:
    """Opens a model's weight files and says which of them holds which tensor.

    A single ``model.safetensors`` goes before an index, as in transformers.

    Returns:
        The open file of every tensor, by the tensor's name.

    Raises:
        CheckpointError: If there are none, one is missing or damaged, or the index contradicts
            them.
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
