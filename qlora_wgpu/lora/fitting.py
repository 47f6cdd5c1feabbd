"""Whether an adapter from a file belongs to a base."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike

from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.families.family import Architecture
from qlora_wgpu.lora.adapter_config import AdapterConfig
from qlora_wgpu.lora.base_names import warn_of_other_name
from qlora_wgpu.lora.file_wholes import wholes
from qlora_wgpu.lora.names import (
    EMBEDDING_A,
    EMBEDDING_B,
    LORA_A,
    LORA_B,
    TOKENS,
    WHOLE,
    Float32Array,
    parse_name,
    tensor_name,
)


def refuse_other_base(
    path: str | PathLike[str],
    stored: AdapterConfig,
    tensors: Mapping[str, Float32Array],
    shapes: Mapping[str, tuple[int, ...]],
    base: str | PathLike[str],
    *,
    whole: bool = True,
    routers: Iterable[str] = (),
) -> None:
    """Makes sure that an adapter was made for a base of this shape; warns of one of another name.

    Args:
        path: The adapter's folder.
        stored: Its settings, which name the base that it was made for.
        tensors: Its tensors.
        shapes: Shapes of the tensors that the base takes, by their names.
        base: The base's name or folder.
        whole: Whether the adapter has to have all of them.
        routers: Names of the matrices of the base's routers, which are not adapted here.

    Raises:
        CheckpointError: If it was not; names both bases.
    """
    odd = _layers(tensors) - _layers(shapes)
    if odd and odd <= {name.removesuffix(".weight") for name in routers}:
        raise CheckpointError(
            f"{path} adapts routers of experts, {min(odd)} among {len(odd)} of them, as PEFT's "
            "all-linear does where they are linear layers; routers stay frozen here: merge it into "
            "its base with PEFT's merge_and_unload, and open the result"
        )
    if difference := _difference(tensors, shapes, whole=whole):
        trained = stored.base_model_name_or_path or "a base that it does not name"
        # Of the right model, PEFT may adapt layers that stay frozen here.
        otherwise = ", or, if it is this one, merge it with PEFT" if odd else ""
        raise CheckpointError(
            f"{path} was trained on {trained} and does not fit {base}: {difference}; open it with "
            f"the model that it was trained on{otherwise}"
        )
    warn_of_other_name(path, stored.base_model_name_or_path, base)


def rows_for(
    architecture: Architecture, stored: AdapterConfig, tensors: Mapping[str, Float32Array]
) -> int:
    """Rows of the embedding that an adapter needs: the base's, and those of tokens that it added.

    Raises:
        CheckpointError: If it has trained some that do not follow on the base's, or a head of its
            own lacks their rows.
    """
    if more := _rows_of_wholes(architecture, tensors):
        return more
    rows, indices = architecture.vocab_size, stored.trainable_token_indices or []
    lists = list(indices.values()) if isinstance(indices, dict) else [indices]
    beyond = [{row for row in each if row >= rows} for each in lists]
    new = set().union(*beyond)
    if not new:
        return rows
    if new != set(range(rows, rows + len(new))):
        raise CheckpointError(
            f"the adapter trained token {max(new)}, but the base has {rows:,} tokens, and not all "
            "in between are the adapter's: open it with the model that it was trained on"
        )
    if (not architecture.tied and len(beyond) < 2) or any(each != new for each in beyond):
        raise CheckpointError(
            f"the adapter added token {max(new)} to the base's {rows:,}, but has rows of it for "
            "one of embedding and head alone: both have to be named in trainable_token_indices"
        )
    return max(new) + 1


def _rows_of_wholes(architecture: Architecture, tensors: Mapping[str, Float32Array]) -> int:
    """Rows of matrices that were trained whole, where they have more than the base's; else 0."""
    rows = {module: len(matrix) for module, matrix in wholes(tensors)}
    larger = {count for count in rows.values() if count > architecture.vocab_size}
    if not larger:
        return 0
    names = (architecture.embed_name, architecture.head_name)
    ends = [name.removesuffix(".weight") for name in names[: 1 if architecture.tied else 2]]
    if len(larger) > 1 or any(rows.get(end) not in larger for end in ends):
        has = " and ".join(f"{module} with {count:,} rows" for module, count in rows.items())
        raise CheckpointError(
            f"the base has {architecture.vocab_size:,} tokens, and of a larger vocabulary the "
            f"adapter has {has} alone: merge it with PEFT, and go on from the result"
        )
    return larger.pop()


def adapter_shapes(architecture: Architecture, stored: AdapterConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of all that an adapter may have for a base, by PEFT's names."""
    shapes: dict[str, tuple[int, ...]] = {}
    for weight in (architecture.embed_name, architecture.head_name):
        name = tensor_name(weight.removesuffix(".weight"), TOKENS)
        shapes[name] = (architecture.vocab_size, architecture.hidden_size)
        name = tensor_name(weight.removesuffix(".weight"), WHOLE)
        shapes[name] = (architecture.vocab_size, architecture.hidden_size)
    for spec in [*architecture.every_linear, architecture.head]:
        rank = stored.rank_of(spec.name)
        shapes[tensor_name(spec.name, LORA_A)] = (rank, spec.in_features)
        shapes[tensor_name(spec.name, LORA_B)] = (spec.out_features, rank)
    embedding = architecture.embed_name.removesuffix(".weight")
    rank = stored.rank_of(embedding)
    shapes[tensor_name(embedding, EMBEDDING_A)] = (rank, architecture.vocab_size)
    shapes[tensor_name(embedding, EMBEDDING_B)] = (architecture.hidden_size, rank)
    return shapes


def _difference(
    tensors: Mapping[str, Float32Array], shapes: Mapping[str, tuple[int, ...]], *, whole: bool
) -> str:
    theirs, ours = _layers(tensors), _layers(shapes)
    if odd := sorted(theirs - ours):
        here = "which this model has not, or not as a layer that is adapted here"
        return f"it adapts {odd[0]} ({len(odd)} such layers), {here}"
    if whole and (odd := sorted(ours - theirs)):
        return f"it has nothing for {odd[0]} ({len(odd)} such layers)"
    for name, tensor in tensors.items():
        if name in shapes and name.endswith(f".{WHOLE}") and ".lora_" not in name:
            if tensor.shape != shapes[name]:
                return f"its {name} has shape {tensor.shape}, this model takes {shapes[name]}"
            continue
        # The other one is the rank, or how many rows are trained.
        side = 1 if name.endswith((f"{LORA_A}.weight", EMBEDDING_A, TOKENS)) else 0
        if name in shapes and tensor.shape[side] != shapes[name][side]:
            return f"its {name} has shape {tensor.shape}, this model takes {shapes[name]}"
    return ""


def _layers(names: Iterable[str]) -> set[str]:
    return {parsed[0] for name in names if (parsed := parse_name(name)) is not None}
