"""Making a model folder out of another one, file by file, where a disk has room for it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.bfloat16 import to_bfloat16
from qlora_wgpu.checkpoint import ModelFolder, atomic_folder
from qlora_wgpu.checkpoint.manifest import read_json_object
from qlora_wgpu.checkpoint.safetensors_file import INDEX, TORCH_NAMES, WEIGHTS, Entry, write_stream
from qlora_wgpu.checkpoint.tokenizer_files import (
    GENERATION,
    PROMPT_FORMAT,
    copy_more_templates,
    copy_tokenizer,
    tokenizer_folder,
)
from qlora_wgpu.errors import CheckpointError, ConfigError, option
from qlora_wgpu.files import exists, is_dir, is_file, is_there

# ---- room, and prompts that go along -------------------------------------------------------------

MARGIN = 1 << 20
"""Bytes for what is written beside weights and is not counted: headers and indexes."""


def check_disk_space(parent: Path, needed: int, what: str, advice: str) -> None:
    """Makes sure that a disk has room, before anything is computed or written."""
    place = parent.absolute()
    while not exists(place) and place != place.parent:
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        raise CheckpointError(
            f"{parent} has room for {free / 1e6:,.1f} MB, but {what} takes "
            f"{needed / 1e6:,.1f} MB: {advice}"
        )


def take_over_prompts(adapter: Path, target: Path) -> None:
    """Writes into a model's folder what an adapter was trained with, over what is there."""
    folder = tokenizer_folder(adapter)
    if folder is None:
        return
    copy_tokenizer(folder, target)
    prompt = _read(folder / PROMPT_FORMAT)
    if prompt.get("prompt_format", "chat") != "chat":  # chats are what a model has without it
        _write(target / PROMPT_FORMAT, prompt)
    ends, known = _ends(folder), _ends(target)
    # A single one is the tokenizer's own, where a model names none.
    if not ends <= known and (known or len(ends) > 1):
        _write(
            target / GENERATION,
            {**_read(target / GENERATION), "eos_token_id": sorted(ends | known)},
        )


def _ends(folder: Path) -> set[int]:
    """Ids that end a generation."""
    ids = {**_read(folder / "config.json"), **_read(folder / GENERATION)}.get("eos_token_id")
    listed = ids if isinstance(ids, list) else [ids]
    return {token for token in listed if isinstance(token, int)}


def _read(path: Path) -> dict[str, Any]:
    return read_json_object(path) if is_there(path) else {}


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


# ---- folders -------------------------------------------------------------------------------------

_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".ckpt")
Tensors = dict[str, tuple[Entry, Callable[[], npt.NDArray[Any]]]]


def refuse_existing(path: Path) -> None:
    """Raises a ConfigError if a folder is there and holds anything, or has no name to get."""
    if not path.name:
        raise ConfigError(f"a new folder needs a name, which {str(path)!r} is not")
    if is_file(path) or (is_dir(path) and any(path.iterdir())):
        raise ConfigError(f"{path} is there already: choose another folder, or remove it")


def write_folder(
    source: ModelFolder,
    target: Path,
    config: dict[str, Any],
    tensors_of: Callable[[str], Tensors],
    progress: Callable[[str], None],
    *,
    adapter: str | PathLike[str] | None = None,
) -> None:
    """Writes a model folder whose files hold what the source's become, whole or not at all.

    ``tensors_of`` says what a tensor becomes: none, itself or several, with their bytes made when
    they are written. An adapter's tokenizer and chat template go before the source's.
    """
    refuse_existing(target)
    files: dict[str, Tensors] = {}
    for name, stored in source.files().items():
        files[name] = {}
        for tensor in stored:
            files[name] |= tensors_of(tensor)
    try:
        weights = sum(entry.nbytes for tensors in files.values() for entry, _ in tensors.values())
        needed = weights + sum(path.stat().st_size for path in _rest(source.text_folder)) + MARGIN
        advice = f"name another place with {option('out', ...)}"
        check_disk_space(target.parent, needed, "the model", advice)
        with atomic_folder(target) as unfinished:
            weight_map: dict[str, str] = {}
            total = 0
            for name, tensors in files.items():
                entries = {n: entry for n, (entry, _) in tensors.items()}

                def data(tensor: str, tensors: Tensors = tensors) -> npt.NDArray[Any]:
                    progress(tensor)
                    return tensors[tensor][1]()

                write_stream(unfinished / name, entries, data)
                weight_map |= dict.fromkeys(entries, name)
                total += sum(entry.nbytes for entry in entries.values())
            if len(set(weight_map.values())) > 1 or WEIGHTS not in source.files():
                index = {"metadata": {"total_size": total}, "weight_map": weight_map}
                (unfinished / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")
            (unfinished / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
            copy_rest(source.text_folder, unfinished)
            if adapter is not None:
                take_over_prompts(Path(adapter), unfinished)
    except OSError as err:
        raise CheckpointError(f"{target} cannot be written: {err.strerror or err}") from err


def copy_rest(source: Path, target: Path) -> None:
    """Copies tokenizer, templates and whatever else is no weight."""
    for path in _rest(source):
        if not exists(target / path.name):
            shutil.copyfile(path, target / path.name)
    copy_more_templates(source, target)


def _rest(source: Path) -> Iterator[Path]:
    """The files of a model folder that are no weights and no index of them."""
    for path in sorted(source.iterdir()):
        left_out = path.name == INDEX or path.name.startswith(".")
        if is_file(path) and not (left_out or path.name.endswith(_NOT_COPIED)):
            yield path


def as_dtype(array: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    """float32 numbers as a file's F32, F16, BF16 or F64, rounded to nearest, ties to even."""
    if dtype == "BF16":
        return to_bfloat16(array)
    return array.astype(TORCH_NAMES[dtype])


def without(config: dict[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """A config.json without some keys."""
    return {key: value for key, value in config.items() if key not in set(keys)}
