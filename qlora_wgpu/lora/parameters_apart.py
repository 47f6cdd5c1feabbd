"""Adapters on bare parameters (``parameters`` explains them) with each expert by itself again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from qlora_wgpu.errors import CheckpointError, UnsupportedModelError
from qlora_wgpu.families.stacking import Stacking
from qlora_wgpu.lora.adapter_config import AdapterConfig
from qlora_wgpu.lora.expert_pairs import PARAMETERS, Pair, again, parted
from qlora_wgpu.lora.names import LORA_A, LORA_B, Float32Array, parse_name, tensor_name
from qlora_wgpu.lora.parameters import (
    HOLDERS,
    INNER,
    Arranged,
    Tensors,
    alpha_for,
    is_named,
    layer_name,
    leaf_of,
    modules_of,
)


def apart(
    tensors: Mapping[str, Float32Array],
    config: AdapterConfig,
    where: object,
    told: Arranged | None = None,
    *,
    stacking: Stacking,
) -> tuple[Tensors, AdapterConfig]:
    """An adapter with experts by themselves, of one as PEFT has it.

    Args:
        tensors: A and B by PEFT's names.
        config: Its settings, with ``target_parameters``.
        where: adapter_config.json, for messages.
        told: What ``arranged`` told of an adapter that ``together`` made this one of.
        stacking: How the base's experts are held, where that is not told.

    Raises:
        CheckpointError: If matrices do not fit the settings.
        UnsupportedModelError: If other parameters than experts' and weights are adapted.
    """
    stacking = stacking if told is None else told.stacking
    made: Tensors = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, int | float] = {}
    stacks: list[str] = []
    wrapped, plain = _wrapped(tensors, config, where)
    for name, array in tensors.items():
        parsed = parse_name(name)
        if parsed is None or parsed[0] not in wrapped:
            made[name] = array
    others = plain + _named_otherwise(config, made, stacking)
    for module in plain:
        own, alpha = config.rank_of(f"{module}.weight"), config.alpha_of(f"{module}.weight")
        if told is None and (own, alpha) != (config.rank_of(module), config.alpha_of(module)):
            ranks[re.escape(module)], alphas[re.escape(module)] = own, alpha
    for module, (held, parameter) in wrapped.items():
        full, at = f"{held}.{parameter}", stacking.in_files(held)
        rank, scaling = config.rank_of(full), config.scaling_of(full)
        pair = _by_expert(tensors, module, rank, where)
        if told is not None:
            kinds = [kind for kind in PARAMETERS[parameter] if kind in told.kinds]
            modules = {kind: layer_name(at, 0, kind, stacking) for kind in kinds}
            ranks_of = {kind: config.rank_of(name) for kind, name in modules.items()}
            if rank != sum(ranks_of.values()):
                raise CheckpointError(
                    f"{where}: {full} has rank {rank}, which is not that of {', '.join(kinds)}"
                )
            factors = {kind: scaling / config.scaling_of(name) for kind, name in modules.items()}
            parts = again(pair, ranks_of, factors, in_turns=stacking.in_turns)
        else:
            parts = parted(parameter, pair, in_turns=stacking.in_turns)
        for kind, (a, b) in parts.items():
            leaf = leaf_of(kind, stacking)
            stacks.append(f"{at}.{leaf}")
            own = a.shape[1]
            alpha = alpha_for(scaling, own, config)
            if told is None and (own, alpha) != (config.r, config.lora_alpha):
                ranks[rf"{re.escape(at)}\.\d+\.{leaf}"] = own
                alphas[rf"{re.escape(at)}\.\d+\.{leaf}"] = alpha
            for expert in range(len(a)):
                layer = layer_name(at, expert, kind, stacking)
                made[tensor_name(layer, LORA_A)] = np.ascontiguousarray(a[expert])
                made[tensor_name(layer, LORA_B)] = np.ascontiguousarray(b[expert])
    written = {re.escape(f"{at}.{p}") for at, p in wrapped.values()}
    written |= {re.escape(f"{module}.weight") for module in plain}
    return made, replace(
        config,
        target_modules=sorted({*others, *stacks}),
        target_parameters=None,
        rank_pattern=ranks | {k: v for k, v in config.rank_pattern.items() if k not in written},
        alpha_pattern=alphas | {k: v for k, v in config.alpha_pattern.items() if k not in written},
    )


def _named_otherwise(
    config: AdapterConfig, kept: Mapping[str, Any], stacking: Stacking
) -> list[str]:
    """What names the layers beside experts and no expert: these are called as some layers are."""
    if isinstance(config.target_modules, str):
        return modules_of(kept)
    names: list[str] = []
    for name in config.target_modules:
        if name.rpartition(".")[2] in stacking.leaves:
            names += [module for module in modules_of(kept) if is_named(module, name)]
        elif not name.endswith(HOLDERS):
            names.append(name)
    return names


def _wrapped(
    tensors: Mapping[str, Float32Array], config: AdapterConfig, where: object
) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """What bare parameters are adapted.

    Returns:
        By the name of a wrapped module, the module of experts and the parameter; and the linear
        layers whose weights are named.
    """
    parsed = (parse_name(name) for name in tensors)
    modules = {p[0] for p in parsed if p is not None}
    names = config.target_parameters or []
    found: dict[str, tuple[str, str]] = {}
    for at in sorted({m.removesuffix(INNER) for m in modules if m.endswith(HOLDERS)}):
        own = [p for p in PARAMETERS if any(is_named(f"{at}.{p}", name) for name in names)]
        for parameter in own:
            is_inner = parameter == "gate_up_proj" and len(own) > 1
            found[at + INNER if is_inner else at] = at, parameter
    every = modules_of(tensors)
    plain = [m for m in every if any(is_named(f"{m}.weight", name) for name in names)]
    full = [f"{at}.{p}" for at, p in found.values()] + [f"{m}.weight" for m in plain]
    odd = [n for n in names if not any(is_named(parameter, n) for parameter in full)]
    if odd or not modules >= found.keys():
        raise UnsupportedModelError(
            f"{where}: target_parameters names {(odd or sorted(found.keys() - modules))[0]}, but "
            "of bare parameters only those of experts, gate_up_proj and down_proj, and weights of "
            "adapted layers are read"
        )
    return found, plain


def _by_expert(tensors: Mapping[str, Float32Array], module: str, rank: int, where: object) -> Pair:
    """(experts, r, in) and (experts, out, r)."""
    try:
        a, b = (tensors[tensor_name(module, leaf)] for leaf in (LORA_A, LORA_B))
    except KeyError as err:
        raise CheckpointError(f"{where}: it lacks {err.args[0]!r}") from None
    if a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1] or len(a) % rank or not a.size:
        raise CheckpointError(
            f"{where}: {module} has matrices of {a.shape} and {b.shape}, but r = {rank} asks for "
            f"({rank} · experts, in_features) and (out_features, {rank} · experts)"
        )
    return a.reshape(-1, rank, a.shape[1]), np.moveaxis(b.reshape(len(b), rank, -1), 2, 0)
