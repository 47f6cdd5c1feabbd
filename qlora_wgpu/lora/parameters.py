"""Adapters on bare parameters, PEFT's ``target_parameters``: experts that a model holds together.

Where transformers has a layer's experts in one parameter, PEFT adapts it as one: of
``P.experts.gate_up_proj`` A is (r · experts, in_features), the experts' one below the other, and B
(out_features, r · experts), an expert's r columns ``experts`` apart. The module that holds the
parameters is wrapped once for each of them, gate_up_proj innermost: its matrices are called
``P.experts.base_layer.lora_A`` and those of down_proj ``P.experts.lora_A``, or so those of the only
one. Here every expert has matrices of its own for gate, up and down: those of gate and up become
parts of a rank that is their sum, and come apart again where they are such parts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from qlora_wgpu.errors import CheckpointError, UnsupportedModelError
from qlora_wgpu.lora.adapter_config import AdapterConfig
from qlora_wgpu.lora.names import LORA_A, LORA_B, Float32Array, parse_name, tensor_name

ARRANGED = "adapted_experts"
"""Under which a file's metadata say what of gpt-oss's experts has matrices of its own."""

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj")
_PARAMETERS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
_INNER = ".base_layer"

Tensors = dict[str, Float32Array]
Pair = tuple[Float32Array, Float32Array]


def together(
    tensors: Mapping[str, Float32Array], config: AdapterConfig
) -> tuple[Tensors, AdapterConfig]:
    """An adapter as PEFT has it for gpt-oss, of one with experts by themselves.

    Args:
        tensors: A and B by PEFT's names.
        config: Its settings.
    """
    kept, experts = _sorted_out(tensors)
    if not experts:
        return dict(tensors), config
    ranks: dict[str, int] = {}
    alphas: dict[str, int | float] = {}
    targets = []
    for at, kinds in experts.items():
        present = [p for p, parts in _PARAMETERS.items() if any(k in kinds for k in parts)]
        for parameter in present:
            own = {k: kinds[k] for k in _PARAMETERS[parameter] if k in kinds}
            scalings = {k: config.scaling_of(f"{at}.0.{k}_proj") for k in own}
            scaling = next(iter(scalings.values()))
            a, b = _stacked(own, scalings, len(_PARAMETERS[parameter]))
            rank = a.shape[1]
            is_inner = parameter == "gate_up_proj" and len(present) > 1
            module = at + _INNER if is_inner else at
            kept[tensor_name(module, LORA_A)] = a.reshape(-1, a.shape[2])
            kept[tensor_name(module, LORA_B)] = np.moveaxis(b, 0, 2).reshape(b.shape[1], -1)
            name = f"{at}.{parameter}"
            targets.append(name)
            ranks[re.escape(name)] = rank
            alphas[re.escape(name)] = _alpha(scaling, rank, config)
    return kept, replace(
        config,
        target_modules=_other_modules(kept, config),
        target_parameters=targets,
        rank_pattern={**ranks, **config.rank_pattern},  # the first that fits counts
        alpha_pattern={**alphas, **config.alpha_pattern},
        lora_dropout=0.0,  # with which PEFT wraps no parameter, and which says how it was trained
    )


def adapted_kinds(tensors: Mapping[str, Float32Array]) -> str:
    """Which of gate, up and down have matrices of their own, for ``ARRANGED``."""
    modules = [parsed[0] for name in tensors if (parsed := parse_name(name)) is not None]
    kinds = {match[3] for module in modules if (match := _EXPERT.fullmatch(module))}
    return " ".join(sorted(kinds))


def apart(
    tensors: Mapping[str, Float32Array],
    config: AdapterConfig,
    where: object,
    *,
    in_turns: bool,
    adapted: str | None = None,
) -> tuple[Tensors, AdapterConfig]:
    """An adapter with experts by themselves, of one as PEFT has it.

    Args:
        tensors: A and B by PEFT's names.
        config: Its settings, with ``target_parameters``.
        where: adapter_config.json, for messages.
        in_turns: Whether gate's rows and up's take turns; else gate's come first.
        adapted: What ``adapted_kinds`` told of an adapter that ``together`` made this one of.

    Raises:
        CheckpointError: If matrices do not fit the settings.
        UnsupportedModelError: If other parameters than experts' are adapted.
    """
    made: Tensors = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, int | float] = {}
    leaves: set[str] = set()
    wrapped = _wrapped(tensors, config, where)
    for name, array in tensors.items():
        parsed = parse_name(name)
        if parsed is None or parsed[0] not in wrapped:
            made[name] = array
    for module, (at, parameter) in wrapped.items():
        full = f"{at}.{parameter}"
        rank, scaling = config.rank_of(full), config.scaling_of(full)
        pair = _by_expert(tensors, module, rank, where)
        if adapted is not None:
            kinds = [kind for kind in _PARAMETERS[parameter] if kind in adapted.split()]
            modules = {kind: f"{at}.0.{kind}_proj" for kind in kinds}
            if rank != sum(map(config.rank_of, modules.values())):
                raise CheckpointError(
                    f"{where}: {full} has rank {rank}, which is not that of {', '.join(kinds)}"
                )
            parts = _again(pair, modules, parameter, config, scaling)
        else:
            parts = _parted(parameter, pair, in_turns=in_turns)
        for kind, (a, b) in parts.items():
            leaf = f"{kind}_proj"
            leaves.add(leaf)
            own = a.shape[1]
            alpha = _alpha(scaling, own, config)
            if adapted is None and (own, alpha) != (config.r, config.lora_alpha):
                ranks[rf"{re.escape(at)}\.\d+\.{leaf}"] = own
                alphas[rf"{re.escape(at)}\.\d+\.{leaf}"] = alpha
            for expert in range(len(a)):
                made[tensor_name(f"{at}.{expert}.{leaf}", LORA_A)] = np.ascontiguousarray(a[expert])
                made[tensor_name(f"{at}.{expert}.{leaf}", LORA_B)] = np.ascontiguousarray(b[expert])
    written = {re.escape(f"{at}.{p}") for at, p in wrapped.values()}
    others = [m for m in config.target_modules if not m.endswith((".experts", _INNER))]
    return made, replace(
        config,
        target_modules=sorted({*others, *leaves}),
        target_parameters=None,
        rank_pattern=ranks | {k: v for k, v in config.rank_pattern.items() if k not in written},
        alpha_pattern=alphas | {k: v for k, v in config.alpha_pattern.items() if k not in written},
    )


@dataclass(frozen=True)
class _Kind:
    """Every expert's A (experts, r, in) and B (experts, out, r) of a kind."""

    a: Float32Array
    b: Float32Array


def _sorted_out(
    tensors: Mapping[str, Float32Array],
) -> tuple[Tensors, dict[str, dict[str, _Kind]]]:
    """What is no expert's, and by the module of experts what each kind has."""
    kept: Tensors = {}
    found: dict[str, dict[str, dict[int, dict[str, Float32Array]]]] = {}
    for name, array in tensors.items():
        parsed = parse_name(name)
        match = _EXPERT.fullmatch(parsed[0]) if parsed is not None else None
        if parsed is None or match is None:
            kept[name] = array
            continue
        experts = found.setdefault(match[1], {}).setdefault(match[3], {})
        experts.setdefault(int(match[2]), {})[parsed[1]] = array
    stacked = {
        at: {kind: _kind(of_experts) for kind, of_experts in kinds.items()}
        for at, kinds in found.items()
    }
    return kept, stacked


def _kind(of_experts: Mapping[int, Mapping[str, Float32Array]]) -> _Kind:
    pairs = [of_experts[i] for i in sorted(of_experts)]
    return _Kind(np.stack([p[LORA_A] for p in pairs]), np.stack([p[LORA_B] for p in pairs]))


def _stacked(kinds: Mapping[str, _Kind], scalings: Mapping[str, float], halves: int) -> Pair:
    """(experts, r, in) and (experts, out, r) of a parameter, its rows taking turns."""
    first = next(iter(kinds.values()))
    a = np.concatenate([kind.a for kind in kinds.values()], axis=1)
    experts, out = first.b.shape[:2]
    b = np.zeros((experts, halves * out, a.shape[1]), np.float32)
    begin, scaling = 0, next(iter(scalings.values()))
    for name, kind in kinds.items():
        end = begin + kind.b.shape[2]
        first_row = ("gate", "up").index(name) if halves > 1 else 0
        factor = np.float32(scalings[name] / scaling)  # one unless their scalings differ
        b[:, first_row::halves, begin:end] = kind.b if factor == 1 else factor * kind.b
        begin = end
    return a, b


def _alpha(scaling: float, rank: int, config: AdapterConfig) -> int | float:
    """What PEFT divides by the rank, or its root, to that scaling."""
    alpha = scaling * (math.sqrt(rank) if config.use_rslora else rank)
    near = (config.lora_alpha, 2 * config.lora_alpha, round(alpha))
    return next((value for value in near if math.isclose(alpha, value, rel_tol=1e-12)), alpha)


def _other_modules(kept: Mapping[str, Any], config: AdapterConfig) -> list[str]:
    """The target modules that are left; of a pattern, the layers themselves."""
    parsed = [p for name in kept if (p := parse_name(name)) is not None]
    modules = sorted({m for m, _ in parsed if not m.endswith((".experts", _INNER))})
    if isinstance(config.target_modules, str):
        return modules
    names = config.target_modules
    return [n for n in names if any(m == n or m.endswith(f".{n}") for m in modules)]


def _wrapped(
    tensors: Mapping[str, Float32Array], config: AdapterConfig, where: object
) -> dict[str, tuple[str, str]]:
    """By the name of a wrapped module, the module of experts and the parameter."""
    parsed = (parse_name(name) for name in tensors)
    modules = {p[0] for p in parsed if p is not None}
    names = config.target_parameters or []
    found: dict[str, tuple[str, str]] = {}
    for at in sorted({m.removesuffix(_INNER) for m in modules if m.endswith((".experts", _INNER))}):
        own = [p for p in _PARAMETERS if any(_is_named(f"{at}.{p}", name) for name in names)]
        for parameter in own:
            is_inner = parameter == "gate_up_proj" and len(own) > 1
            found[at + _INNER if is_inner else at] = at, parameter
    odd = [n for n in names if not any(_is_named(f"{at}.{p}", n) for at, p in found.values())]
    if odd or not modules >= found.keys():
        raise UnsupportedModelError(
            f"{where}: target_parameters names {(odd or sorted(found.keys() - modules))[0]}, but "
            "of bare parameters only those of experts, gate_up_proj and down_proj, are read"
        )
    return found


def _is_named(parameter: str, target: str) -> bool:
    return parameter == target or parameter.endswith(f".{target}")


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


def _parted(parameter: str, pair: Pair, *, in_turns: bool) -> dict[str, Pair]:
    """Each kind's matrices: parts of the rank where those of gate and up share none of it."""
    a, b = pair
    if parameter == "down_proj":
        return {"down": pair}
    inner, half = b.shape[1] // 2, a.shape[1] // 2
    gate, up = (b[:, ::2], b[:, 1::2]) if in_turns else (b[:, :inner], b[:, inner:])
    if a.shape[1] % 2 == 0 and not gate[:, :, half:].any() and not up[:, :, :half].any():
        return {"gate": (a[:, :half], gate[:, :, :half]), "up": (a[:, half:], up[:, :, half:])}
    return {"gate": (a, gate), "up": (a, up)}


def _again(
    pair: Pair, modules: Mapping[str, str], parameter: str, config: AdapterConfig, scaling: float
) -> dict[str, Pair]:
    """What ``_stacked`` put together: parts of the rank, each kind's as the settings say."""
    (a, b), begin = pair, 0
    made: dict[str, Pair] = {}
    for kind, module in modules.items():
        end = begin + config.rank_of(module)
        halves = len(_PARAMETERS[parameter])
        own = b[:, _PARAMETERS[parameter].index(kind) :: halves, begin:end]
        factor = np.float32(scaling / config.scaling_of(module))
        made[kind] = a[:, begin:end], own if math.isclose(factor, 1, rel_tol=1e-6) else own * factor
        begin = end
    return made
