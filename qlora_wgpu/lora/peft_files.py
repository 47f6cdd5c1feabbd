"""LoRA adapters in PEFT's format, out and in."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np

from qlora_wgpu.checkpoint.atomic import atomic_folder, write_file
from qlora_wgpu.checkpoint.safetensors_file import SafetensorsFile
from qlora_wgpu.checkpoint.safetensors_format import METADATA
from qlora_wgpu.checkpoint.safetensors_writer import write_safetensors
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError
from qlora_wgpu.families.family import PLAIN, Stacking
from qlora_wgpu.lora.config import AdapterConfig, TokenIndices, read_adapter_config, to_json
from qlora_wgpu.lora.expert_parameters import ARRANGED, Arranged, apart, arranged, together
from qlora_wgpu.lora.peft_names import (
    EMBEDDING_A,
    LORA_A,
    LORA_B,
    MAGNITUDE,
    TOKENS,
    WHOLE,
    Float32Array,
    bias_name,
    is_a,
    other_of_pair,
    parse_name,
    split_biases,
    tensor_name,
)
from qlora_wgpu.presence import is_dir, is_file, is_there


@dataclass(frozen=True)
class StoredRows:
    """A matrix's trained rows.

    Attributes:
        module: The matrix's module.
        indices: Which rows they take the place of.
        rows: (indices, columns).
    """

    module: str
    indices: Sequence[int]
    rows: Float32Array


def stored_rows(tensors: Mapping[str, Float32Array], config: AdapterConfig) -> Iterator[StoredRows]:
    """The trained rows of an adapter as ``load_adapter`` reads it."""
    for name, rows in tensors.items():
        parsed = parse_name(name)
        if parsed is not None and parsed[1] == TOKENS:
            yield StoredRows(parsed[0], _indices_of(parsed[0], config), rows)


def is_whole_matrix(name: str) -> bool:
    """Whether a tensor is the base's matrix, which PEFT writes beside what it adapts of it.

    That is so of trained rows of a resized one, and of a pair on the head or the embedding. All its
    rows are the base's or trained, so it need not be read.
    """
    return name.endswith(".base_layer.weight")


def without_copies(
    where: Path, tensors: Mapping[str, Float32Array], indices: TokenIndices | None
) -> dict[str, Float32Array]:
    """An adapter's tensors without the rows that PEFT writes once more, of a head that is tied.

    Raises:
        CheckpointError: If a copy is another one.
    """
    kept = dict(tensors)
    rows = [n for n in kept if (parsed := parse_name(n)) is not None and parsed[1] == TOKENS]
    if not isinstance(indices, list) or len(rows) < 2:
        return kept
    own = next((name for name in rows if ".lm_head." not in name), rows[0])
    for name in rows:
        if name != own and not np.array_equal(kept[name], kept[own]):
            raise CheckpointError(f"{where}: {name!r} and {own!r} are tied, but differ")
    return {name: array for name, array in kept.items() if name == own or name not in rows}


def check_trained_rows(
    where: Path, tensors: Mapping[str, Float32Array], config: AdapterConfig
) -> None:
    """Sees that each matrix that is said to have trained rows has so many, and no other has any.

    Raises:
        CheckpointError: If that is not so, or a number is not finite.
    """
    indices = config.trainable_token_indices
    every = list(stored_rows(tensors, config))
    if indices and not every:
        raise CheckpointError(f"{where}: trainable_token_indices is set, but it holds no rows")
    for each in every:
        if not each.indices:
            raise CheckpointError(
                f"{where}: it holds rows of {each.module}, of which trainable_token_indices says "
                "nothing"
            )
        if each.rows.ndim != 2 or len(each.rows) != len(each.indices) or not each.rows.size:
            raise CheckpointError(
                f"{where}: the trained rows of {each.module} have shape {each.rows.shape}, but "
                f"trainable_token_indices names {len(each.indices)} tokens"
            )
        if not np.isfinite(each.rows).all():
            raise CheckpointError(f"{where}: the trained rows of {each.module} are not finite")


def _indices_of(module: str, config: AdapterConfig) -> Sequence[int]:
    indices = config.trainable_token_indices or []
    if isinstance(indices, list):
        return indices
    named = (rows for name, rows in indices.items() if f".{module}".endswith(f".{name}"))
    return next(named, [])


_COPIES = (".modules_to_save", ".original_module")


def is_other_copy(name: str, names: Collection[str]) -> bool:
    """Whether a tensor is what PEFT writes beside a whole matrix where the vocabulary was resized.

    That is the same matrix by its name in the model, and the one that it took the place of.
    """
    for part in _COPIES:
        if name.endswith(f"{part}.weight"):
            return f"{name.removesuffix(f'{part}.weight')}.weight" in names
    return False


def is_saved(module: str, config: AdapterConfig) -> bool:
    """Whether the settings say that a module was trained whole, as PEFT reads them."""
    if module.endswith(_COPIES):  # without the matrix itself
        return False
    names = config.modules_to_save or []
    # PEFT ties others to the embedding, of which its own settings then say nothing.
    tied = bool(names) and config.ensure_weight_tying
    return tied or any(module.endswith(name) for name in names)


def wholes(tensors: Mapping[str, Float32Array]) -> Iterator[tuple[str, Float32Array]]:
    """The modules of an adapter as ``load_adapter`` reads it, and their matrices."""
    for name, array in tensors.items():
        parsed = parse_name(name)
        if parsed is not None and parsed[1] == WHOLE:
            yield parsed[0], array


def without_tied_copy(
    tensors: Mapping[str, Float32Array], config: AdapterConfig
) -> dict[str, Float32Array]:
    """An adapter's tensors without a tied head, which PEFT writes beside the embedding."""
    kept = dict(tensors)
    found = dict(wholes(tensors)) if config.ensure_weight_tying else {}
    heads = [module for module in found if module.rpartition(".")[2] == "lm_head"]
    others = [array for module, array in found.items() if module not in heads]
    for head in heads:
        if any(np.array_equal(found[head], other) for other in others):
            del kept[tensor_name(head, WHOLE)]
    return kept


def check_whole(where: Path, tensors: Mapping[str, Float32Array], config: AdapterConfig) -> None:
    """Sees that matrices which were trained whole are there, and are finite matrices.

    Raises:
        CheckpointError: If that is not so.
        UnsupportedModelError: If a norm was.
    """
    found = dict(wholes(tensors))
    if config.modules_to_save and not found:
        raise CheckpointError(f"{where}: modules_to_save is set, but it holds no such matrix")
    for module, array in found.items():
        if array.ndim == 1:
            raise UnsupportedModelError(
                f"{where} has a whole {module} (modules_to_save), but only embedding and head are "
                "taken whole: merge the adapter with PEFT, or train it without"
            )
        if array.ndim != 2 or not array.size:
            raise CheckpointError(f"{where}: the {module} it holds has shape {array.shape}")
        if not (np.isfinite(array.min()) and np.isfinite(array.max())):
            raise CheckpointError(f"{where}: the {module} it holds is not finite")


WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def save_adapter(
    folder: str | PathLike[str],
    tensors: Mapping[str, Float32Array],
    config: AdapterConfig,
    *,
    stacking: Stacking | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes an adapter that ``PeftModel.from_pretrained`` loads as it is.

    Args:
        folder: The target; made if it does not exist, else its other files are left alone.
        tensors: float32 matrices by PEFT's names, such as
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" (r, in_features) and
            "….lora_B.weight" (out_features, r).
        config: Settings of its training, and the base model that PEFT loads.
        stacking: How the base's experts are held together, where they are written as PEFT adapts
            what is held so; else each is written by itself.
        metadata: What else the file says of itself.

    Raises:
        CheckpointError: If tensors are misnamed, of the wrong shape or not finite (nothing is
            written then), or the folder cannot be written.
    """
    folder = Path(folder)
    own, trained = split_biases(tensors)
    pairs = _standard_names(folder, own, config)
    _check_pairs(folder, pairs, config)
    metadata = {**METADATA, **(metadata or {})}
    if stacking is not None:
        metadata[ARRANGED] = arranged(pairs, stacking).to_text()
        pairs, config = together(pairs, config, stacking)
    adapted = {module for module, _ in filter(None, map(parse_name, pairs))}
    pairs |= {_stored_bias(m, adapted): array for m, array in trained.items()}
    text = json.dumps(to_json(config), indent=2, allow_nan=False) + "\n"
    if is_dir(folder):
        _write(folder, pairs, text, metadata)
    else:
        with atomic_folder(folder) as unfinished:
            _write(unfinished, pairs, text, metadata)


def load_adapter(
    folder: str | PathLike[str], *, biases: bool = False, stacking: Stacking | None = None
) -> tuple[dict[str, Float32Array], AdapterConfig]:
    """Reads an adapter that this package or PEFT wrote.

    Args:
        folder: Its folder.
        biases: Whether the caller takes biases that were trained beside it, too.
        stacking: How the base's experts are held together, for files of PEFT's with adapters of
            what holds them, which do not tell.

    Returns:
        The float32 matrices by PEFT's names, and what the adapter was trained with. Biases are
        called as ``biases.bias_name`` has it.

    Raises:
        CheckpointError: If a file is missing or damaged, or the two do not fit.
        UnsupportedModelError: If the adapter needs what this package does not compute.
    """
    folder = require_adapter_files(folder)
    with SafetensorsFile(folder / WEIGHTS) as file:
        config = read_adapter_config(folder / CONFIG, _adapted(folder, file.names()))
        held = set(file.names())
        own = (n for n in file.names() if not (is_whole_matrix(n) or is_other_copy(n, held)))
        stored = {name: file.float32(name) for name in own}
        told = _arranged(folder, file.metadata.get(ARRANGED))
    stored = without_copies(folder / WEIGHTS, stored, config.trainable_token_indices)
    stored = without_tied_copy(stored, config)
    if config.target_parameters:
        where = folder / CONFIG
        stored, config = apart(stored, config, where, told, stacking=stacking or PLAIN)
    pairs, trained = split_biases(stored)
    if trained and not biases:
        raise UnsupportedModelError(
            f"{folder} holds biases that were trained beside the adapter ({next(iter(trained))}), "
            "which are taken for reading and merging alone: merge it, and go on from the result"
        )
    tensors = _standard_names(folder / WEIGHTS, pairs, config)
    _check_pairs(folder / WEIGHTS, tensors, config)
    _check_biases(folder / WEIGHTS, trained, config)
    return tensors | {bias_name(module): array for module, array in trained.items()}, config


def _arranged(folder: Path, text: str | None) -> Arranged | None:
    try:
        return None if text is None else Arranged.from_text(text)
    except ValueError as err:
        raise CheckpointError(f"{folder / WEIGHTS}: its metadata {ARRANGED} are damaged") from err


def _write(
    folder: Path, tensors: Mapping[str, Float32Array], config: str, metadata: Mapping[str, str]
) -> None:
    write_safetensors(folder / WEIGHTS, tensors, metadata)
    write_file(folder / CONFIG, config.encode())


def _stored_bias(module: str, adapted: set[str]) -> str:
    return bias_name(f"{module}.base_layer" if module in adapted else module)


def require_adapter_files(folder: str | PathLike[str]) -> Path:
    """The folder of an adapter.

    Raises:
        CheckpointError: If a file that an adapter has is missing in it.
    """
    folder = Path(folder).expanduser()
    if not is_dir(folder):
        raise CheckpointError(f"there is no adapter folder '{folder}'")
    missing = [name for name in (CONFIG, WEIGHTS) if not is_there(folder / name)]
    if not missing:
        return folder
    if WEIGHTS in missing and is_file(folder / "adapter_model.bin"):
        raise CheckpointError(
            f"{folder} has its weights only as adapter_model.bin, a pickle that is not read: load "
            "the adapter with PEFT and save_pretrained it, which writes safetensors"
        )
    hint = ""
    if missing == [WEIGHTS] and is_there(folder / "adapters.safetensors"):
        hint = ": it holds an adapter of mlx-lm's, which is not read; merge it with mlx_lm.fuse"
    elif len(missing) == 2:
        if is_file(folder / "config.json"):
            hint = ": it holds a model, not an adapter"
        elif is_file(folder / "adapter" / CONFIG):
            hint = f": did you mean {folder / 'adapter'}?"
    raise CheckpointError(f"{folder} has no {' and no '.join(missing)}{hint}")


def _adapted(folder: Path, names: list[str]) -> list[str]:
    """The full names of the layers that have a pair."""
    if not names:
        raise CheckpointError(f"{folder / WEIGHTS} holds no tensors")
    parsed = [parse_name(name) for name in names]
    return sorted({module for module, leaf in filter(None, parsed) if other_of_pair(leaf)})


def _standard_names(
    where: Path, tensors: Mapping[str, Float32Array], config: AdapterConfig
) -> dict[str, Float32Array]:
    standard: dict[str, Float32Array] = {}
    for name, array in tensors.items():
        parsed = parse_name(name)
        if parsed is not None and parsed[1] == WHOLE and not is_saved(parsed[0], config):
            raise UnsupportedModelError(
                f"{where} holds the whole {parsed[0]}, which adapter_config.json does not say was "
                "trained; PEFT writes embedding and head so where the vocabulary was resized: "
                "merge the adapter with PEFT, and go on from the result"
            )
        if parsed is None:
            raise UnsupportedModelError(
                f"{where}: tensor {name!r} is no LoRA matrix of a linear layer, which would be "
                f"called {tensor_name('…', LORA_A)} or ….lora_B.weight"
            )
        key = tensor_name(*parsed)
        if key in standard:
            raise CheckpointError(f"{where}: it holds {key!r} more than once")
        standard[key] = array.reshape(-1) if parsed[1] == MAGNITUDE else array
    return standard


def _check_pairs(where: Path, tensors: Mapping[str, Float32Array], config: AdapterConfig) -> None:
    """Each layer has an A and a B of its rank, and a magnitude if it is DoRA's."""
    if not tensors:
        raise CheckpointError(f"{where}: an adapter needs at least one pair of matrices")
    leaves = {name: parsed for name in tensors if (parsed := parse_name(name)) is not None}
    for name, (module, leaf) in leaves.items():
        if (other_leaf := other_of_pair(leaf)) is None:
            continue
        other = tensor_name(module, other_leaf)
        if other not in tensors:
            raise CheckpointError(f"{where}: it holds {name!r}, but not {other!r}")
        _check_matrix(where, name, leaf, tensors[name], config.rank_of(module))
    _check_magnitudes(where, tensors, leaves, config)
    check_trained_rows(where, tensors, config)
    check_whole(where, tensors, config)


def _check_biases(where: Path, biases: Mapping[str, Float32Array], config: AdapterConfig) -> None:
    for module, array in biases.items():
        if config.bias == "none":
            raise CheckpointError(f"{where}: bias is 'none', but it holds one of {module}")
        if array.ndim != 1 or not np.isfinite(array).all():
            raise CheckpointError(f"{where}: the bias of {module} is no vector of finite numbers")


def _check_matrix(where: Path, name: str, leaf: str, array: Float32Array, r: int) -> None:
    if array.ndim != 2 or array.shape[0 if is_a(leaf) else 1] != r or array.size == 0:
        expected = f"({r}, in_features)" if is_a(leaf) else f"(out_features, {r})"
        raise CheckpointError(
            f"{where}: {name!r} has shape {array.shape}, but r = {r} asks for {expected}"
        )
    if not (np.isfinite(array.min()) and np.isfinite(array.max())):
        raise CheckpointError(f"{where}: {name!r} holds NaN or infinity")


def _check_magnitudes(
    where: Path,
    tensors: Mapping[str, Float32Array],
    leaves: Mapping[str, tuple[str, str]],
    config: AdapterConfig,
) -> None:
    """DoRA has one vector for each pair, and LoRA none."""
    if config.use_dora and (of := [m for m, leaf in leaves.values() if leaf == EMBEDDING_A]):
        raise UnsupportedModelError(
            f"{where}: use_dora scales {of[0]}, an embedding, whose rows' norms are not computed "
            "here: merge the adapter with PEFT, and go on from the result"
        )
    magnitudes = {name for name, (_, leaf) in leaves.items() if leaf == MAGNITUDE}
    modules = {module for module, leaf in leaves.values() if leaf == LORA_A}
    needed = {tensor_name(m, MAGNITUDE) for m in modules} if config.use_dora else set()
    if odd := sorted(needed ^ magnitudes):
        has = "lacks" if odd[0] in needed else "holds"
        raise CheckpointError(
            f"{where}: use_dora is {str(config.use_dora).lower()}, but it {has} {odd[0]!r}"
        )
    for name in sorted(magnitudes):
        outputs = tensors[tensor_name(leaves[name][0], LORA_B)].shape[0]
        if tensors[name].shape != (outputs,):
            shape = tensors[name].shape
            raise CheckpointError(f"{where}: {name!r} has shape {shape}, not ({outputs},)")
        if not np.isfinite(tensors[name]).all():
            raise CheckpointError(f"{where}: {name!r} holds NaN or infinity")
