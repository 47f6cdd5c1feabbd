"""Checks that an adapter from a file fits a base, and lists what PEFT computes differently."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path

from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.families.family import Architecture, ExpertSpec, LinearSpec
from qlora_wgpu.lora.config import AdapterConfig
from qlora_wgpu.lora.peft_names import (
    EMBEDDING_A,
    EMBEDDING_B,
    RANK_AXIS,
    TOKENS,
    WHOLE,
    Float32Array,
    of_kind,
    pair_shapes,
    parse_name,
    parsed_names,
    tensor_name,
)
from qlora_wgpu.lora.trained_tokens import Vocabulary

_CACHED = re.compile(r"models--(.+)/snapshots/[^/]+/?$")
_NO_NAMES = ("", "..")  # of the working directory, as a user gives them
_PART = re.compile(r"-\d{5}-of-\d{5}$")
# Suffixes of names that say how the weights are stored.
_FORM = re.compile(
    r"[-_.](?:bnb|unsloth|dynamic|gguf|awq|gptq|autoround|hf|mlx|nf4|fp4|mxfp4|nvfp4|fp8|int[48]"
    r"|[248]-?bits?|w\d+a\d+|bf16|fp?16|fp?32|i?q\d(?:_\w+)?|g\d+|quantized|dequantized)$"
)
_warned_of: set[tuple[str, str, str]] = set()


# ---- the base's name -------------------------------------------------------------------------


def warn_of_other_name(
    path: str | PathLike[str], named: str | None, base: str | PathLike[str]
) -> None:
    """Warns once if an adapter names another base than the one that it is opened on."""
    warning = str(path), named or "", str(base)
    if warning in _warned_of or not is_other_name(named, base):
        return
    _warned_of.add(warning)
    warnings.warn(
        f"{path} was trained on {named} and is opened on {base}, which has the same shapes: unless "
        "that is the same model under another name, open it with the model that it was trained on",
        stacklevel=3,
    )


def is_other_name(named: str | None, base: str | PathLike[str]) -> bool:
    """Whether two names are of different models.

    Compares the last parts of folders, of names on the Hub and of its cache, ignoring case and how
    the weights are stored (``-bnb-4bit``, ``-Q4_K_M.gguf``).
    """
    if not named or str(base) == named or _is_same_place(Path(named), Path(base)):
        return False
    here = Path(base).expanduser()
    ours, theirs = _plain(str(here.resolve() if here.name in _NO_NAMES else base)), _plain(named)
    return bool(ours and theirs) and ours != theirs


def _is_same_place(one: Path, other: Path) -> bool:
    try:
        return one.expanduser().samefile(other.expanduser())
    except (OSError, RuntimeError, ValueError):  # one does not exist
        return False


def _plain(name: str) -> str:
    """The last part of a name, without the suffix for how its weights are stored."""
    cached = _CACHED.search(name.replace("\\", "/"))
    last = cached[1].rpartition("--")[2] if cached else Path(name.replace("\\", "/")).name
    last = last.partition("@")[0]  # without a revision
    last = _PART.sub("", last.casefold().removesuffix(".gguf"))
    if last in _NO_NAMES:
        return ""
    while (shorter := _FORM.sub("", last)) != last:
        last = shorter
    return last


# ---- the base's shapes -----------------------------------------------------------------------


def refuse_other_base(
    path: str | PathLike[str],
    stored: AdapterConfig,
    tensors: Mapping[str, Float32Array],
    shapes: Mapping[str, tuple[int, ...]],
    base: str | PathLike[str],
    *,
    whole: bool = True,
) -> None:
    """Refuses an adapter whose tensors do not fit; warns if it names another base.

    ``shapes`` are those that it may have; if ``whole``, it must have all of them.
    """
    odd = _layers(tensors) - _layers(shapes)
    if difference := _difference(tensors, shapes, whole=whole):
        trained = stored.base_model_name_or_path or "a base that it does not name"
        # Of the right model, PEFT may adapt layers that stay frozen here.
        otherwise = ", or merge it with PEFT if that is this model" if odd else ""
        raise CheckpointError(
            f"{path} was trained on {trained} and does not fit {base}: {difference}; open it with "
            f"the model that it was trained on{otherwise}"
        )
    warn_of_other_name(path, stored.base_model_name_or_path, base)


def rows_for(
    architecture: Architecture, stored: AdapterConfig, tensors: Mapping[str, Float32Array]
) -> int:
    """Rows of the embedding that an adapter needs: the base's, and those of tokens it added."""
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
            f"the adapter trained token {max(new)}, but the base has {rows:,} tokens and the "
            "adapter lacks some in between: open it with the model that it was trained on"
        )
    if (not architecture.tied and len(beyond) < 2) or any(each != new for each in beyond):
        raise CheckpointError(
            f"the adapter added token {max(new)} to the base's {rows:,}, but has its row for only "
            "one of embedding and head: trainable_token_indices must name both"
        )
    return max(new) + 1


def _rows_of_wholes(architecture: Architecture, tensors: Mapping[str, Float32Array]) -> int:
    rows = {module: len(matrix) for module, matrix in of_kind(tensors, WHOLE).items()}
    larger = {count for count in rows.values() if count > architecture.vocab_size}
    if not larger:
        return 0
    names = (architecture.embed_name, architecture.head_name)
    ends = [name.removesuffix(".weight") for name in names[: 1 if architecture.tied else 2]]
    if len(larger) > 1 or any(rows.get(end) not in larger for end in ends):
        has = " and ".join(f"{module} with {count:,} rows" for module, count in rows.items())
        raise CheckpointError(
            f"the base has {architecture.vocab_size:,} tokens, and of a larger vocabulary the "
            f"adapter has only {has}: merge it with PEFT and train from the result"
        )
    return larger.pop()


def adapter_shapes(architecture: Architecture, stored: AdapterConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors that an adapter of a base may have, by PEFT's names."""
    shapes: dict[str, tuple[int, ...]] = {}
    ends = Vocabulary.of(architecture)
    for module in (ends.embedding, ends.head):
        for leaf in (TOKENS, WHOLE):
            shapes[tensor_name(module, leaf)] = ends.rows_of(module), ends.columns
    for spec in [*architecture.every_linear, *architecture.routers, ends.head_layer]:
        shapes |= pair_shapes(spec, stored.rank_of(spec.name))
    embedding = ends.embedding_layer
    rank = stored.rank_of(embedding.name)
    shapes |= pair_shapes(embedding, rank, (EMBEDDING_A, EMBEDDING_B))
    return shapes


def _difference(
    tensors: Mapping[str, Float32Array], shapes: Mapping[str, tuple[int, ...]], *, whole: bool
) -> str:
    theirs, ours = _layers(tensors), _layers(shapes)
    if odd := sorted(theirs - ours):
        here = "which this model does not have, or which cannot be adapted here"
        return f"it adapts {odd[0]} ({len(odd)} such layers), {here}"
    if whole and (odd := sorted(ours - theirs)):
        return f"it has no weights for {odd[0]} ({len(odd)} such layers)"
    for name, tensor in tensors.items():
        leaf = parsed[1] if (parsed := parse_name(name)) is not None else ""
        # One side of a pair's matrices is the rank, one of trained rows their number.
        free = 0 if leaf == TOKENS else RANK_AXIS.get(leaf)
        takes = shapes.get(name, tensor.shape)
        if any(tensor.shape[i] != takes[i] for i in range(len(takes)) if i != free):
            return f"its {name} has shape {tensor.shape}, this model expects {takes}"
    return ""


def _layers(names: Iterable[str]) -> set[str]:
    return {module for module, _ in parsed_names(names)}


# ---- PEFT ------------------------------------------------------------------------------------


def is_written_together(
    config: AdapterConfig, targets: Sequence[LinearSpec], experts: Sequence[ExpertSpec]
) -> bool:
    """Whether an adapter of experts is written with PEFT's ``target_parameters``.

    PEFT reads matrices for each expert, and stacks them itself, only for model types that it knows
    (``ExpertSpec.fused``), without dropout, with one scaling that is alpha / r, for gate, up and
    down or for down alone, by their last names, and where no other adapted layer has these. All
    else has to be written as PEFT has it in memory (``expert_parameters.to_target_parameters``).
    """
    names = {spec.name for spec in targets}
    if _dense_as_experts(names, experts):
        return not config.use_dora  # which PEFT has for no parameter
    adapted = [stack for stack in experts if stack.linears[0].name in names]
    first = [stack.linears[0].name for stack in adapted]
    is_plain = all(
        (config.rank_of(name), config.alpha_of(name)) == (config.r, config.lora_alpha)
        for name in first
    )
    return bool(adapted) and (
        any(stack.stacking.in_turns or not stack.fused for stack in adapted)
        or bool(config.use_rslora or config.lora_dropout)
        or not is_plain
        or isinstance(config.target_modules, str)  # which may fit what holds experts
        or not {stack.name for stack in adapted}.isdisjoint(config.target_modules)
        or not _are_whole(adapted, len(experts))
    )


def peft_differences(
    config: AdapterConfig, targets: Sequence[LinearSpec], experts: Sequence[ExpertSpec]
) -> list[str]:
    """A sentence for each thing that PEFT 0.21 computes differently."""
    dense = _dense_as_experts({spec.name for spec in targets}, experts)
    if not dense or not config.use_dora:
        return []
    return [
        f"PEFT 0.21 with transformers 5 treats {dense[0]} ({len(dense)} such layers) as "
        "experts because of its name, and has no DoRA for experts: merge the adapter, or leave "
        "these layers out of lora.target_modules"
    ]


def _dense_as_experts(names: Collection[str], experts: Sequence[ExpertSpec]) -> list[str]:
    """The adapted layers that PEFT takes for experts because of their names, but which are not."""
    if not any(stack.fused and not stack.stacking.in_turns for stack in experts):
        return []
    stacked = {spec.name for stack in experts for spec in stack.linears}
    leaves = {stack.leaf for stack in experts}
    return sorted(n for n in {*names} - stacked if n.rpartition(".")[2] in leaves)


def _are_whole(adapted: Sequence[ExpertSpec], count: int) -> bool:
    """Whether every layer's gate, up and down have adapters, or every layer's down alone."""
    whole = len(adapted) == count
    return whole or (
        3 * len(adapted) == count
        and all(stack.leaf == stack.stacking.leaves[-1] for stack in adapted)
    )
