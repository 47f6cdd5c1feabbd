"""Model folders made from others, file by file: merged models, and bases in 4 bits."""

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
from qlora_wgpu.checkpoint.quantized.bitsandbytes import nf4_entries, nf4_parts, quantization_config
from qlora_wgpu.checkpoint.safetensors_file import INDEX, TORCH_NAMES, WEIGHTS, Entry, write_stream
from qlora_wgpu.checkpoint.tokenizer_files import (
    GENERATION,
    PROMPT_FORMAT,
    copy_more_templates,
    copy_tokenizer,
    tokenizer_folder,
)
from qlora_wgpu.config import QuantConfig
from qlora_wgpu.config.yaml import read_json_object
from qlora_wgpu.errors import CheckpointError, ConfigError, UnsupportedModelError, option, reason
from qlora_wgpu.families.family import Architecture, find_family
from qlora_wgpu.files import exists, is_dir, is_file, is_there
from qlora_wgpu.model.checkpoint_reader import stored_name
from qlora_wgpu.model.pretrained import check_stored_shapes
from qlora_wgpu.quant import quantize_nf4

# ---- folders -------------------------------------------------------------------------------------

MARGIN = 1 << 20
"""Bytes for headers and indexes, which are not counted."""

_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".ckpt")
Tensors = dict[str, tuple[Entry, Callable[[], npt.NDArray[Any]]]]


def refuse_existing(path: Path) -> None:
    """Raises a ConfigError unless a path is a new or empty folder."""
    if not path.name:
        raise ConfigError(f"{str(path)!r} is not a name for a new folder")
    if is_file(path) or (is_dir(path) and any(path.iterdir())):
        raise ConfigError(f"{path} already exists: choose another folder, or remove it")


def write_folder(
    source: ModelFolder,
    target: Path,
    config: dict[str, Any],
    tensors_of: Callable[[str], Tensors],
    progress: Callable[[str], None],
    *,
    adapter: str | PathLike[str] | None = None,
) -> None:
    """Writes a model folder atomically, from the tensors of another one.

    ``tensors_of`` returns the new tensors for one of the source's; their bytes are computed when
    they are written. An adapter's tokenizer and chat template replace the source's.
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
        advice = f"choose another folder with {option('out', ...)}"
        check_disk_space(target.parent, needed, "the model", advice)
        with atomic_folder(target) as unfinished:
            weight_map: dict[str, str] = {}
            for name, tensors in files.items():
                entries = {n: entry for n, (entry, _) in tensors.items()}

                def data(tensor: str, tensors: Tensors = tensors) -> npt.NDArray[Any]:
                    progress(tensor)
                    return tensors[tensor][1]()

                write_stream(unfinished / name, entries, data)
                weight_map |= dict.fromkeys(entries, name)
            if len(set(weight_map.values())) > 1 or WEIGHTS not in source.files():
                index = {"metadata": {"total_size": weights}, "weight_map": weight_map}
                _write(unfinished / INDEX, index)
            _write(unfinished / "config.json", config)
            copy_rest(source.text_folder, unfinished)
            if adapter is not None:
                copy_prompt_files(Path(adapter), unfinished)
    except OSError as err:
        raise CheckpointError(f"{target} cannot be written: {reason(err)}") from err


def copy_rest(source: Path, target: Path) -> None:
    """Copies the tokenizer, templates and all other files without weights."""
    for path in _rest(source):
        if not exists(target / path.name):
            shutil.copyfile(path, target / path.name)
    copy_more_templates(source, target)


def _rest(source: Path) -> Iterator[Path]:
    for path in sorted(source.iterdir()):
        ignored = path.name == INDEX or path.name.startswith(".")
        if is_file(path) and not (ignored or path.name.endswith(_NOT_COPIED)):
            yield path


def as_dtype(array: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    """float32 numbers as F32, F16, BF16 or F64, rounded to nearest, ties to even."""
    if dtype == "BF16":
        return to_bfloat16(array)
    return array.astype(TORCH_NAMES[dtype])


def without_keys(config: dict[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """A config.json without some keys."""
    return {key: value for key, value in config.items() if key not in set(keys)}


def check_disk_space(parent: Path, needed: int, what: str, advice: str) -> None:
    """Raises a CheckpointError if the disk has too little free space."""
    place = parent.absolute()
    while not exists(place) and place != place.parent:
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        raise CheckpointError(
            f"{parent} has {free / 1e6:,.1f} MB of free space, but {what} needs "
            f"{needed / 1e6:,.1f} MB: {advice}"
        )


# ---- an adapter's prompt files -------------------------------------------------------------------


def copy_prompt_files(adapter: Path, target: Path) -> None:
    """Copies an adapter's tokenizer, templates and prompt format into a model's folder."""
    folder = tokenizer_folder(adapter)
    if folder is None:
        return
    copy_tokenizer(folder, target)
    prompt = _read(folder / PROMPT_FORMAT)
    if prompt.get("prompt_format", "chat") != "chat":  # chat is a model's default
        _write(target / PROMPT_FORMAT, prompt)
    ends, known = _end_tokens(folder), _end_tokens(target)
    # If the model lists none, a single one is the tokenizer's EOS token.
    if not ends <= known and (known or len(ends) > 1):
        _write(
            target / GENERATION,
            {**_read(target / GENERATION), "eos_token_id": sorted(ends | known)},
        )


def _end_tokens(folder: Path) -> set[int]:
    """The tokens that end a generation."""
    ids = {**_read(folder / "config.json"), **_read(folder / GENERATION)}.get("eos_token_id")
    listed = ids if isinstance(ids, list) else [ids]
    return {token for token in listed if isinstance(token, int)}


def _read(path: Path) -> dict[str, Any]:
    return read_json_object(path) if is_there(path) else {}


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


# ---- a base in 4 bits ----------------------------------------------------------------------------

_HEAD = "lm_head"  # always listed: transformers' default list is not used if there is one

_DTYPES = {name: TORCH_NAMES[name] for name in ("F32", "F16", "BF16")}  # bitsandbytes'


def quantize_folder(
    model: str | PathLike[str],
    out: str | PathLike[str],
    quant: QuantConfig | None = None,
    *,
    experts: bool = False,
    progress: Callable[[str], None] = lambda name: None,
) -> None:
    """Writes a 4-bit folder that bitsandbytes reads, with one tensor in memory at a time.

    Only linear layers of the text model are quantized: not embeddings, ``lm_head``, norms, biases
    or routers. Experts are not quantized by default, since transformers 5 stacks them, and does
    not read them in 4 bits.

    Args:
        model: Folder or Hub name of the base.
        out: The new folder.
        quant: Block size and double quantization.
        experts: Whether to quantize experts; then only this package reads the folder.
        progress: Called with each tensor's name before it is written.
    """
    settings = quant or QuantConfig()
    form = settings.blocksize, settings.double_quant
    folder = ModelFolder.open(model)
    if folder.config.get("quantization_config") or folder.is_quantized:
        raise UnsupportedModelError(f"{model} is already quantized")
    architecture = find_family(folder.config).read(folder.config)
    check_stored_shapes(folder, architecture)
    specs = architecture.every_linear if experts else architecture.linears
    linears = {stored_name(folder, architecture, f"{s.stored}.weight") for s in specs}
    parts: dict[str, dict[str, npt.NDArray[Any]]] = {}

    def quantized(name: str) -> dict[str, npt.NDArray[Any]]:
        if name not in parts:
            parts.clear()
            weight = quantize_nf4(folder[name].read(), *form)
            parts[name] = nf4_parts(name, weight, _DTYPES[folder[name].dtype])
        return parts[name]

    def tensors_of(name: str) -> Tensors:
        stack, weight = folder.stack(name), folder[name]
        if experts and stack is not None:
            return {n: t for part in stack.parts for n, t in tensors_of(part).items()}
        if name not in linears:
            return {name: (Entry(weight.dtype, weight.shape), weight.raw)}
        if weight.dtype not in _DTYPES:
            raise UnsupportedModelError(
                f"{model}: {name} has dtype {weight.dtype}, which cannot be quantized: use the "
                "model in 16 bits"
            )
        return {
            part: (entry, lambda part=part: quantized(name)[part])  # type: ignore[misc]
            for part, entry in nf4_entries(name, weight.shape, *form).items()
        }

    config = {
        **folder.config,
        "quantization_config": quantization_config(
            settings.double_quant, skipped_modules(folder, architecture, linears)
        ),
    }
    write_folder(folder, Path(out), config, tensors_of, progress)


def skipped_modules(
    folder: ModelFolder, architecture: Architecture, quantized: Iterable[str]
) -> list[str]:
    """The largest modules without a quantized weight that may have linear layers.

    Their names are those in the files, and those in transformers 5's model, which adds ``model.``
    to modules such as ``vision_tower``.
    """
    inner = {prefix for name in quantized for prefix in _prefixes(_module(name))}
    kept = {
        next(prefix for prefix in _prefixes(_module(name)) if prefix not in inner)
        for name in folder.names()
        if len(folder[name].shape) == 2 and _module(name) not in inner
    }
    running = {_running(name, architecture) for name in kept}
    embedding = architecture.embed_name, stored_name(folder, architecture, architecture.embed_name)
    return sorted({_HEAD, *kept, *running} - {_module(name) for name in embedding})


def _module(tensor: str) -> str:
    return tensor.rpartition(".")[0]


def _prefixes(module: str) -> list[str]:
    """A module and all modules that contain it, the outermost first."""
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _running(name: str, architecture: Architecture) -> str:
    for own, other in architecture.stored_prefixes:
        if other and f"{name}.".startswith(other):
            return (own + f"{name}.".removeprefix(other)).removesuffix(".")
    return name if name == _HEAD or name.startswith("model.") else f"model.{name}"
