"""LoRA adapters in PEFT's files: saved, loaded and checked."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np

from qlora_wgpu.checkpoint.atomic import atomic_folder, write_file
from qlora_wgpu.checkpoint.safetensors_file import METADATA, SafetensorsFile, write_safetensors
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError
from qlora_wgpu.families.family import PLAIN, Stacking
from qlora_wgpu.files import is_dir, is_file, is_there
from qlora_wgpu.lora.config import AdapterConfig, read_adapter_config, to_json
from qlora_wgpu.lora.expert_parameters import (
    ARRANGED,
    ExpertArrangement,
    arranged,
    from_target_parameters,
    to_target_parameters,
)
from qlora_wgpu.lora.peft_names import (
    EMBEDDING_A,
    LORA_A,
    MAGNITUDE,
    OTHER_OF_PAIR,
    RANK_AXIS,
    TOKENS,
    WHOLE,
    Float32Array,
    adapted_layers,
    bias_name,
    is_named,
    of_kind,
    parse_name,
    parsed_names,
    split_biases,
    tensor_name,
)

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
_COPIES = (".modules_to_save", ".original_module")


@dataclass(frozen=True)
class StoredRows:
    """A matrix's trained rows."""

    module: str
    indices: Sequence[int]  # the rows that they replace
    rows: Float32Array  # (indices, columns)


def stored_rows(tensors: Mapping[str, Float32Array], config: AdapterConfig) -> list[StoredRows]:
    found, indices = of_kind(tensors, TOKENS), config.trainable_token_indices or []
    if isinstance(indices, list):
        return [StoredRows(module, indices, rows) for module, rows in found.items()]
    named = {m: next((i for n, i in indices.items() if is_named(m, n)), []) for m in found}
    return [StoredRows(module, named[module], rows) for module, rows in found.items()]


def save_adapter(
    folder: str | PathLike[str],
    tensors: Mapping[str, Float32Array],
    config: AdapterConfig,
    *,
    stacking: Stacking | None = None,
    bare: Collection[str] = (),
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes an adapter for ``PeftModel.from_pretrained``.

    Args:
        folder: The target, created if it does not exist; other files in it are left alone.
        tensors: float32 matrices by PEFT's names, such as
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" (r, in_features) and
            "….lora_B.weight" (out_features, r).
        config: The training settings, and the base model that PEFT loads.
        stacking: How the base stacks its experts, to write them with PEFT's
        ``target_parameters``; None to write each by itself.
        bare: Modules whose weight transformers holds as a bare parameter.
        metadata: Further metadata for the file.
    """
    folder = Path(folder)
    own, trained = split_biases(tensors)
    own = _by_standard_names(folder, own)
    _check(folder, own, config)
    metadata = {**METADATA, **(metadata or {})}
    if stacking is not None:
        metadata[ARRANGED] = arranged(own, stacking).to_text()
        own, config = to_target_parameters(own, config, stacking, bare)
    adapted = {module for module, _ in parsed_names(own)}
    for module, array in trained.items():
        own[bias_name(f"{module}.base_layer" if module in adapted else module)] = array
    text = json.dumps(to_json(config), indent=2, allow_nan=False) + "\n"
    if is_dir(folder):
        _write(folder, own, text, metadata)
    else:
        with atomic_folder(folder) as unfinished:
            _write(unfinished, own, text, metadata)


def _write(
    folder: Path, tensors: Mapping[str, Float32Array], config: str, metadata: Mapping[str, str]
) -> None:
    write_safetensors(folder / WEIGHTS, tensors, metadata)
    write_file(folder / CONFIG, config.encode())


def load_adapter(
    folder: str | PathLike[str], *, biases: bool = False, stacking: Stacking | None = None
) -> tuple[dict[str, Float32Array], AdapterConfig]:
    """Reads an adapter of this package or PEFT: float32 matrices by PEFT's names, and settings.

    Biases are named by ``bias_name``.
    """
    folder = require_adapter_files(folder)
    where = folder / WEIGHTS
    with SafetensorsFile(where) as file:
        config = read_adapter_config(folder / CONFIG, _adapted(folder, file.names()))
        held = set(file.names())
        stored = {n: file.float32(n) for n in file.names() if not _is_copy(n, held)}
        arrangement = _arranged(folder, file.metadata.get(ARRANGED))
    pairs, trained = split_biases(stored)
    tensors = _without_tied_copies(where, _by_standard_names(where, pairs), config)
    if config.target_parameters:
        tensors, config = from_target_parameters(
            tensors, config, folder / CONFIG, arrangement, stacking=stacking or PLAIN
        )
    if trained and not biases:
        raise UnsupportedModelError(
            f"{folder} has biases that were trained with the adapter ({next(iter(trained))}), "
            "which only inference and merging support: merge it and train from the result"
        )
    _check(where, tensors, config)
    _check_biases(where, trained, config)
    return tensors | {bias_name(module): array for module, array in trained.items()}, config


def require_adapter_files(folder: str | PathLike[str]) -> Path:
    folder = Path(folder).expanduser()
    if not is_dir(folder):
        raise CheckpointError(f"the adapter folder '{folder}' does not exist")
    missing = [name for name in (CONFIG, WEIGHTS) if not is_there(folder / name)]
    if not missing:
        return folder
    if WEIGHTS in missing and is_file(folder / "adapter_model.bin"):
        raise CheckpointError(
            f"{folder} has its weights only in adapter_model.bin, a pickle, which is not "
            "supported: load the adapter with PEFT and save it with save_pretrained, which writes "
            "safetensors"
        )
    hint = ""
    if missing == [WEIGHTS] and is_there(folder / "adapters.safetensors"):
        hint = ": it contains an mlx-lm adapter, which is not supported; merge it with mlx_lm.fuse"
    elif len(missing) == 2:
        if is_file(folder / "config.json"):
            hint = ": it contains a model, not an adapter"
        elif is_file(folder / "adapter" / CONFIG):
            hint = f": did you mean {folder / 'adapter'}?"
    raise CheckpointError(f"{folder} has no {' and no '.join(missing)}{hint}")


def _adapted(folder: Path, names: list[str]) -> list[str]:
    if not names:
        raise CheckpointError(f"{folder / WEIGHTS} contains no tensors")
    return sorted({module for module, leaf in parsed_names(names) if leaf in RANK_AXIS})


def _arranged(folder: Path, text: str | None) -> ExpertArrangement | None:
    try:
        return None if text is None else ExpertArrangement.from_text(text)
    except ValueError as err:
        raise CheckpointError(f"{folder / WEIGHTS}: the metadata {ARRANGED} is damaged") from err


def _is_copy(name: str, names: Collection[str]) -> bool:
    """Whether a tensor is a copy that PEFT writes in addition to the adapter's own tensors.

    With trained rows, or a pair on head or embedding, that is the base's matrix; with a matrix that
    is trained whole, the same under its name in the model, and the one that it replaces.
    """
    if name.endswith(".base_layer.weight"):
        return True
    parts = [part for part in _COPIES if name.endswith(f"{part}.weight")]
    return any(f"{name.removesuffix(f'{part}.weight')}.weight" in names for part in parts)


def _by_standard_names(where: Path, tensors: Mapping[str, Float32Array]) -> dict[str, Float32Array]:
    """The tensors by ``tensor_name``, magnitudes as vectors."""
    standard: dict[str, Float32Array] = {}
    for name, array in tensors.items():
        parsed = parse_name(name)
        if parsed is None:
            raise UnsupportedModelError(
                f"{where}: tensor {name!r} is not a LoRA matrix of a linear layer (expected "
                f"{tensor_name('…', LORA_A)} or ….lora_B.weight)"
            )
        key = tensor_name(*parsed)
        if key in standard:
            raise CheckpointError(f"{where}: it contains {key!r} more than once")
        standard[key] = array.reshape(-1) if parsed[1] == MAGNITUDE else array
    return standard


def _without_tied_copies(
    where: Path, tensors: Mapping[str, Float32Array], config: AdapterConfig
) -> dict[str, Float32Array]:
    """The tensors without those of a tied head, which PEFT writes as well as the embedding's."""
    kept = dict(tensors)
    rows = of_kind(tensors, TOKENS)
    if isinstance(config.trainable_token_indices, list) and len(rows) > 1:
        own = next((module for module in rows if not _is_head(module)), next(iter(rows)))
        for module in [module for module in rows if module != own]:
            name = tensor_name(module, TOKENS)
            if not np.array_equal(rows[module], rows[own]):
                other = tensor_name(own, TOKENS)
                raise CheckpointError(f"{where}: {name!r} and {other!r} are tied, but differ")
            del kept[name]
    found = of_kind(tensors, WHOLE) if config.ensure_weight_tying else {}
    others = [array for module, array in found.items() if not _is_head(module)]
    for module in filter(_is_head, found):
        if any(np.array_equal(found[module], other) for other in others):
            del kept[tensor_name(module, WHOLE)]
    return kept


def _is_head(module: str) -> bool:
    return is_named(module, "lm_head")


def _is_saved(module: str, config: AdapterConfig) -> bool:
    if module.endswith(_COPIES):  # without the matrix itself
        return False
    names = config.modules_to_save or []
    # PEFT ties others to the embedding, which its own settings then do not mention.
    tied = bool(names) and config.ensure_weight_tying
    return tied or any(module.endswith(name) for name in names)


def _check(where: Path, tensors: Mapping[str, Float32Array], config: AdapterConfig) -> None:
    for module in of_kind(tensors, WHOLE):
        if not _is_saved(module, config):
            raise UnsupportedModelError(
                f"{where} contains the whole {module}, but adapter_config.json does not say that "
                "it was trained; PEFT writes embedding and head like this if the vocabulary was "
                "resized: merge the adapter with PEFT and train from the result"
            )
    if not tensors:
        raise CheckpointError(f"{where}: at least one pair of matrices is required")
    for name, array in tensors.items():
        module, leaf = parse_name(name) or ("", "")
        if leaf in RANK_AXIS:
            other = tensor_name(module, OTHER_OF_PAIR[leaf])
            if other not in tensors:
                raise CheckpointError(f"{where}: it contains {name!r}, but not {other!r}")
            _check_matrix(where, name, RANK_AXIS[leaf], array, config.rank_of(module))
    _check_magnitudes(where, tensors, config)
    _check_rows(where, stored_rows(tensors, config), config)
    _check_whole(where, of_kind(tensors, WHOLE), config)


def _is_finite(array: Float32Array) -> bool:
    return bool(np.isfinite(array.min()) and np.isfinite(array.max()))  # makes no copy


def _check_matrix(where: Path, name: str, axis: int, array: Float32Array, r: int) -> None:
    if array.ndim != 2 or array.shape[axis] != r or array.size == 0:
        expected = f"(out_features, {r})" if axis else f"({r}, in_features)"
        raise CheckpointError(
            f"{where}: {name!r} has shape {array.shape}, expected {expected} for r = {r}"
        )
    if not _is_finite(array):
        raise CheckpointError(f"{where}: {name!r} contains NaN or infinity")


def _check_magnitudes(
    where: Path, tensors: Mapping[str, Float32Array], config: AdapterConfig
) -> None:
    """Checks that DoRA has a vector for each pair, and LoRA none."""
    if config.use_dora and (of := [*of_kind(tensors, EMBEDDING_A)]):
        raise UnsupportedModelError(
            f"{where}: use_dora is not supported for {of[0]}, an embedding: merge the adapter with "
            "PEFT and train from the result"
        )
    magnitudes = of_kind(tensors, MAGNITUDE)
    outputs = {layer.module: len(layer.b) for layer in adapted_layers(tensors)}
    needed = outputs.keys() if config.use_dora else set()
    if odd := sorted(tensor_name(module, MAGNITUDE) for module in needed ^ magnitudes.keys()):
        has = "holds" if odd[0] in tensors else "lacks"
        raise CheckpointError(
            f"{where}: use_dora is {str(config.use_dora).lower()}, but it {has} {odd[0]!r}"
        )
    for module, array in sorted(magnitudes.items()):
        name, size = tensor_name(module, MAGNITUDE), outputs[module]
        if array.shape != (size,):
            raise CheckpointError(f"{where}: {name!r} has shape {array.shape}, expected ({size},)")
        if not np.isfinite(array).all():
            raise CheckpointError(f"{where}: {name!r} contains NaN or infinity")


def _check_rows(where: Path, every: Sequence[StoredRows], config: AdapterConfig) -> None:
    """Checks that matrices have as many trained rows as the settings name, and others none."""
    if config.trainable_token_indices and not every:
        raise CheckpointError(f"{where}: trainable_token_indices is set, but there are no rows")
    for each in every:
        if not each.indices:
            raise CheckpointError(
                f"{where}: it contains rows of {each.module}, which trainable_token_indices does "
                "not name"
            )
        if each.rows.ndim != 2 or len(each.rows) != len(each.indices) or not each.rows.size:
            raise CheckpointError(
                f"{where}: the trained rows of {each.module} have shape {each.rows.shape}, but "
                f"trainable_token_indices names {len(each.indices)} tokens"
            )
        if not _is_finite(each.rows):
            raise CheckpointError(f"{where}: the rows of {each.module} contain NaN or infinity")


def _check_whole(where: Path, found: Mapping[str, Float32Array], config: AdapterConfig) -> None:
    """Checks that matrices that were trained whole exist, and that no norm was trained."""
    if config.modules_to_save and not found:
        raise CheckpointError(f"{where}: modules_to_save is set, but there is no such matrix")
    for module, array in found.items():
        if array.ndim == 1:
            raise UnsupportedModelError(
                f"{where}: modules_to_save = {module} is not supported (supported: embedding and "
                "head): merge the adapter with PEFT, or train it without"
            )
        if array.ndim != 2 or not array.size:
            raise CheckpointError(f"{where}: {module} has shape {array.shape}, expected a matrix")
        if not _is_finite(array):
            raise CheckpointError(f"{where}: {module} contains NaN or infinity")


def _check_biases(where: Path, biases: Mapping[str, Float32Array], config: AdapterConfig) -> None:
    for module, array in biases.items():
        if config.bias == "none":
            raise CheckpointError(f"{where}: bias is 'none', but there is one of {module}")
        if array.ndim != 1 or not np.isfinite(array).all():
            raise CheckpointError(
                f"{where}: the bias of {module} must be a vector of finite numbers"
            )
