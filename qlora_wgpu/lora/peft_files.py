"""LoRA adapters in PEFT's format, out and in."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.atomic import atomic_folder, write_file, write_safetensors
from qlora_wgpu.checkpoint.safetensors_file import SafetensorsFile
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError
from qlora_wgpu.lora.adapter_config import AdapterConfig, read_adapter_config, to_json

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"

# PEFT leaves the adapter's own name out of files; some tools keep it: lora_A.default.weight.
MAGNITUDE = ".lora_magnitude_vector"  # of DoRA
_MAGNITUDE = re.compile(r"(base_model\.model\.(.+)\.lora_magnitude_vector)(?:\..+)?")
_NAME = re.compile(r"(base_model\.model\.(.+)\.lora_[AB])(?:\.[^.]+)?\.weight")

Float32Array = npt.NDArray[np.float32]


def save_adapter(
    folder: str | PathLike[str],
    tensors: Mapping[str, Float32Array],
    config: AdapterConfig,
) -> None:
    """Writes an adapter that ``PeftModel.from_pretrained`` loads as it is.

    Args:
        folder: Where to; made if it does not exist, and its other files are left alone if it does.
        tensors: float32 matrices by PEFT's names, such as
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" (r, in_features) and
            "….lora_B.weight" (out_features, r).
        config: What it was trained with, and what PEFT loads as the base model.

    Raises:
        CheckpointError: If tensors are misnamed, of the wrong shape or not finite (nothing is
            written then), or the folder cannot be written.
    """
    folder = Path(folder)
    pairs = _standard_names(folder, tensors)
    _check_pairs(folder, pairs, config)
    text = json.dumps(to_json(config), indent=2, allow_nan=False) + "\n"
    if folder.is_dir():
        _write(folder, pairs, text)
    else:
        with atomic_folder(folder) as unfinished:
            _write(unfinished, pairs, text)


def load_adapter(folder: str | PathLike[str]) -> tuple[dict[str, Float32Array], AdapterConfig]:
    """Reads an adapter that this package or PEFT wrote.

    Returns:
        The float32 matrices by PEFT's names, and what the adapter was trained with.

    Raises:
        CheckpointError: If a file is missing or damaged, or the two do not fit.
        UnsupportedModelError: If the adapter needs what this package does not compute.
    """
    folder = Path(folder).expanduser()
    _check_files(folder)
    with SafetensorsFile(folder / WEIGHTS) as file:
        config = read_adapter_config(folder / CONFIG, _adapted(folder, file.names()))
        stored = {name: file.float32(name) for name in file.names()}
    tensors = _standard_names(folder / WEIGHTS, stored)
    _check_pairs(folder / WEIGHTS, tensors, config)
    return tensors, config


def _write(folder: Path, tensors: Mapping[str, Float32Array], config: str) -> None:
    write_safetensors(folder / WEIGHTS, tensors)
    write_file(folder / CONFIG, config.encode())


def _check_files(folder: Path) -> None:
    if not folder.is_dir():
        raise CheckpointError(f"there is no adapter folder '{folder}'")
    missing = [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]
    if not missing:
        return
    if WEIGHTS in missing and (folder / "adapter_model.bin").is_file():
        raise CheckpointError(
            f"{folder} has its weights only as adapter_model.bin, a pickle that is not read: load "
            "the adapter with PEFT and save_pretrained it, which writes safetensors"
        )
    hint = ""
    if len(missing) == 2:
        if (folder / "config.json").is_file():
            hint = ": it holds a model, not an adapter"
        elif (folder / "adapter" / CONFIG).is_file():
            hint = f": did you mean {folder / 'adapter'}?"
    raise CheckpointError(f"{folder} has no {' and no '.join(missing)}{hint}")


def _adapted(folder: Path, names: list[str]) -> list[str]:
    """The full names of the layers that have a pair."""
    found = {match[2] for name in names if (match := _NAME.fullmatch(name))}
    if not found and not names:
        raise CheckpointError(f"{folder / WEIGHTS} holds no tensors")
    return sorted(found)


def _standard_names(where: Path, tensors: Mapping[str, Float32Array]) -> dict[str, Float32Array]:
    result: dict[str, Float32Array] = {}
    for name, array in tensors.items():
        match = _NAME.fullmatch(name)
        magnitude = _MAGNITUDE.fullmatch(name)
        if magnitude is not None:
            result[magnitude[1]] = array.reshape(-1)
            continue
        if match is None:
            raise UnsupportedModelError(
                f"{where}: tensor {name!r} is no LoRA matrix of a linear layer, which would be "
                "called base_model.model.….lora_A.weight or ….lora_B.weight"
            )
        standard = f"{match[1]}.weight"
        if standard in result:
            raise CheckpointError(f"{where}: it holds {standard!r} more than once")
        result[standard] = array
    return result


def _check_pairs(where: Path, tensors: Mapping[str, Float32Array], config: AdapterConfig) -> None:
    if not tensors:
        raise CheckpointError(f"{where}: an adapter needs at least one pair of matrices")
    magnitudes = {n: a for n, a in tensors.items() if n.endswith(MAGNITUDE)}
    _check_magnitudes(where, magnitudes, tensors, config)
    for name, array in tensors.items():
        if name in magnitudes:
            continue
        is_a = name.endswith(".lora_A.weight")
        stem = name.removesuffix(".lora_A.weight").removesuffix(".lora_B.weight")
        r = config.rank_of(stem.removeprefix("base_model.model."))
        other = f"{stem}.lora_{'B' if is_a else 'A'}.weight"
        if other not in tensors:
            raise CheckpointError(f"{where}: it holds {name!r}, but not {other!r}")
        if array.ndim != 2 or array.shape[0 if is_a else 1] != r or array.size == 0:
            expected = f"({r}, in_features)" if is_a else f"(out_features, {r})"
            raise CheckpointError(
                f"{where}: {name!r} has shape {array.shape}, but r = {r} asks for {expected}"
            )
        if not (np.isfinite(array.min()) and np.isfinite(array.max())):
            raise CheckpointError(f"{where}: {name!r} holds NaN or infinity")


def _check_magnitudes(
    where: Path,
    found: Mapping[str, Float32Array],
    tensors: Mapping[str, Float32Array],
    config: AdapterConfig,
) -> None:
    """DoRA has one vector for each pair, and LoRA none."""
    pairs = {n.removesuffix(".lora_A.weight") for n in tensors if n.endswith(".lora_A.weight")}
    wanted = {f"{stem}{MAGNITUDE}" for stem in pairs} if config.use_dora else set()
    if wrong := sorted(wanted ^ set(found)):
        has = "lacks" if wrong[0] in wanted else "holds"
        raise CheckpointError(
            f"{where}: use_dora is {str(config.use_dora).lower()}, but it {has} {wrong[0]!r}"
        )
    for name, array in found.items():
        outputs = tensors[f"{name.removesuffix(MAGNITUDE)}.lora_B.weight"].shape[0]
        if array.shape != (outputs,):
            raise CheckpointError(f"{where}: {name!r} has shape {array.shape}, not ({outputs},)")
        if not np.isfinite(array).all():
            raise CheckpointError(f"{where}: {name!r} holds NaN or infinity")
