"""Adapters on bare parameters, PEFT's ``target_parameters``: experts stacked in one tensor.

Where transformers has a layer's experts in one parameter, PEFT adapts it as one: for
``P.experts.gate_up_proj`` A is (r · experts, in_features), the experts stacked, and B
(out_features, r · experts), an expert's r columns ``experts`` apart. PEFT wraps the module that
holds the parameters once for each of them, gate_up_proj innermost: its matrices are called
``P.experts.base_layer.lora_A``, and those of down_proj, or of a single parameter,
``P.experts.lora_A``. Experts without a gate have up_proj instead of gate_up_proj. Here every expert
has matrices of its own for gate, up and down, named as in its files (``Stacking``): to write them,
the ranks of gate and up are concatenated; to read them, they are split again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from qlora_wgpu.errors import CheckpointError, UnsupportedModelError
from qlora_wgpu.families.family import Stacking
from qlora_wgpu.lora.config import AdapterConfig
from qlora_wgpu.lora.peft_names import (
    LORA_A,
    LORA_B,
    RANK_AXIS,
    Float32Array,
    is_named,
    parse_name,
    parsed_names,
    tensor_name,
)

ARRANGED = "adapted_experts"
"""The key of a file's metadata that says how its experts are stacked."""

Value = TypeVar("Value", int, int | float)
Pair = tuple[Float32Array, Float32Array]
"""Every expert's A (experts, r, in) and B (experts, out, r)."""

INNER = ".base_layer"
HOLDERS = (".experts", ".experts" + INNER)
"""How names of modules that hold experts end."""

Tensors = dict[str, Float32Array]


@dataclass(frozen=True)
class ExpertArrangement:
    """How ``to_target_parameters`` has stacked an adapter's experts."""

    kinds: tuple[str, ...]  # those of gate, up and down that have matrices of their own
    stacking: Stacking  # how the base's experts are held

    def to_text(self) -> str:
        """The value for a file's metadata."""
        return f"{' '.join(self.kinds)}; {self.stacking.to_json()}"

    @classmethod
    def from_text(cls, text: str) -> ExpertArrangement:
        """Reads ``to_text``'s value; without a stacking it is that of gpt-oss."""
        kinds, separator, stacking = text.partition(";")
        of_base = Stacking.from_json(stacking) if separator else Stacking(in_turns=True)
        return cls(tuple(kinds.split()), of_base)


def to_target_parameters(
    tensors: Mapping[str, Float32Array],
    config: AdapterConfig,
    stacking: Stacking,
    bare: Collection[str] = (),
) -> tuple[Tensors, AdapterConfig]:
    """Converts an adapter with matrices for each expert to PEFT's ``target_parameters``.

    Other layers are also named by their parameters if these are ``bare``, or if they have an
    expert's name: PEFT would take their modules for experts.
    """
    kept, experts = _sorted_out(tensors, stacking)
    modules = _modules_of(kept)
    by_weight = [m for m in modules if m in bare or m.rpartition(".")[2] in stacking.leaves]
    ranks: dict[str, int] = {}
    alphas: dict[str, int | float] = {}
    for module in by_weight:
        called = stacking.router_in_memory(module) if module in bare else module
        name = f"{called}.weight"
        ranks[name], alphas[name] = config.rank_of(module), config.alpha_of(module)
        for leaf in (LORA_A, LORA_B):
            kept[tensor_name(called, leaf)] = kept.pop(tensor_name(module, leaf))
    for at, kinds in experts.items():
        held = stacking.in_memory(at)
        parameters = stacking.parameters
        present = [p for p, parts in parameters.items() if any(k in kinds for k in parts)]
        for parameter in present:
            held_kinds = parameters[parameter]
            own = {k: kinds[k] for k in held_kinds if k in kinds}
            scalings = {k: config.scaling_of(layer_name(at, 0, k, stacking)) for k in own}
            scaling = next(iter(scalings.values()))
            a, b = _stacked(own, scalings, held_kinds, in_turns=stacking.in_turns)
            module = _wrapping(held, parameter, present)
            kept[tensor_name(module, LORA_A)] = a.reshape(-1, a.shape[2])
            kept[tensor_name(module, LORA_B)] = np.moveaxis(b, 0, 2).reshape(b.shape[1], -1)
            name, rank = f"{held}.{parameter}", a.shape[1]
            ranks[name], alphas[name] = rank, alpha_for(scaling, rank, config)
    # A pattern is replaced by the layers themselves.
    others = [m for m in modules if m not in by_weight]
    if not isinstance(names := config.target_modules, str):
        others = [name for name in names if any(is_named(module, name) for module in others)]
    return kept, replace(
        config,
        target_modules=others,
        target_parameters=[*ranks],
        rank_pattern={**_escaped(ranks), **config.rank_pattern},  # the first that fits counts
        alpha_pattern={**_escaped(alphas), **config.alpha_pattern},
        lora_dropout=0.0,  # PEFT wraps no parameter with dropout, which matters in training only
    )


def _escaped(values: Mapping[str, Value]) -> dict[str, Value]:
    return {re.escape(name): value for name, value in values.items()}


def _wrapping(held: str, parameter: str, present: Collection[str]) -> str:
    """The module that PEFT stores a parameter's matrices under, given the adapted parameters."""
    is_inner = parameter != "down_proj" and len(present) > 1
    return held + INNER if is_inner else held


def _rows(kind: str, held: Sequence[str], count: int, *, in_turns: bool) -> slice:
    """The rows of one of the kinds that a parameter of ``count`` rows holds."""
    place, parts = held.index(kind), len(held)
    if in_turns:
        return slice(place, None, parts)
    return slice(place * count // parts, (place + 1) * count // parts)


def _stacked(
    kinds: Mapping[str, Pair], scalings: Mapping[str, float], held: Sequence[str], *, in_turns: bool
) -> Pair:
    """A parameter's pair, whose rank is the sum of those of its adapted halves."""
    a = np.concatenate([pair[0] for pair in kinds.values()], axis=1)
    experts, out = next(iter(kinds.values()))[1].shape[:2]
    b = np.zeros((experts, len(held) * out, a.shape[1]), np.float32)
    begin, scaling = 0, next(iter(scalings.values()))
    for kind, (_, own) in kinds.items():
        end = begin + own.shape[2]
        factor = np.float32(scalings[kind] / scaling)  # one unless their scalings differ
        rows = _rows(kind, held, b.shape[1], in_turns=in_turns)
        b[:, rows, begin:end] = own if factor == 1 else factor * own
        begin = end
    return a, b


def _parted(
    pair: Pair,
    ranks: Mapping[str, int],
    factors: Mapping[str, float],
    held: Sequence[str],
    *,
    in_turns: bool,
) -> dict[str, Pair]:
    """Splits what ``_stacked`` made, by its parts' ranks; ``factors`` multiply their B."""
    (a, b), begin = pair, 0
    made: dict[str, Pair] = {}
    for kind, rank in ranks.items():
        end, factor = begin + rank, np.float32(factors[kind])
        own = b[:, _rows(kind, held, b.shape[1], in_turns=in_turns), begin:end]
        made[kind] = a[:, begin:end], own if math.isclose(factor, 1, rel_tol=1e-6) else own * factor
        begin = end
    return made


def _parted_by_zeros(kinds: Sequence[str], pair: Pair, *, in_turns: bool) -> dict[str, Pair]:
    """Each half's pair, with its part of the rank if gate and up share none of it."""
    a, b = pair
    if len(kinds) == 1:
        return {kinds[0]: pair}
    half = a.shape[1] // 2
    gate, up = (b[:, _rows(kind, kinds, b.shape[1], in_turns=in_turns)] for kind in kinds)
    if a.shape[1] % 2 == 0 and not gate[:, :, half:].any() and not up[:, :, :half].any():
        return {"gate": (a[:, :half], gate[:, :, :half]), "up": (a[:, half:], up[:, :, half:])}
    return {"gate": (a, gate), "up": (a, up)}


def arranged(tensors: Mapping[str, Float32Array], stacking: Stacking) -> ExpertArrangement:
    """Which of gate, up and down are adapted."""
    modules = [module for module, _ in parsed_names(tensors)]
    pattern = _expert(stacking)
    leaves = {match[3] for module in modules if (match := pattern.fullmatch(module))}
    pairs = zip(stacking.kinds, stacking.leaves, strict=True)
    return ExpertArrangement(tuple(kind for kind, leaf in pairs if leaf in leaves), stacking)


def _pair(of_experts: Mapping[int, Mapping[str, Float32Array]]) -> Pair:
    pairs = [of_experts[i] for i in sorted(of_experts)]
    return np.stack([p[LORA_A] for p in pairs]), np.stack([p[LORA_B] for p in pairs])


def layer_name(at: str, expert: int, kind: str, stacking: Stacking) -> str:
    return f"{at}.{expert}.{stacking.leaves[stacking.kinds.index(kind)]}"


def _expert(stacking: Stacking) -> re.Pattern[str]:
    leaves = "|".join(map(re.escape, stacking.leaves))
    return re.compile(rf"(.*\.experts)\.(\d+)\.({leaves})")


def _sorted_out(
    tensors: Mapping[str, Float32Array], stacking: Stacking
) -> tuple[Tensors, dict[str, dict[str, Pair]]]:
    """The tensors of other layers, and the pairs of each kind by the experts' module."""
    kept: Tensors = {}
    found: dict[str, dict[str, dict[int, dict[str, Float32Array]]]] = {}
    pattern = _expert(stacking)
    for name, array in tensors.items():
        parsed = parse_name(name)
        match = pattern.fullmatch(parsed[0]) if parsed is not None else None
        if parsed is None or match is None:
            kept[name] = array
            continue
        kind = stacking.kinds[stacking.leaves.index(match[3])]
        experts = found.setdefault(match[1], {}).setdefault(kind, {})
        experts.setdefault(int(match[2]), {})[parsed[1]] = array
    experts_of = {
        at: {kind: _pair(of_experts) for kind, of_experts in kinds.items()}
        for at, kinds in found.items()
    }
    return kept, experts_of


def alpha_for(scaling: float, rank: int, config: AdapterConfig) -> int | float:
    alpha = scaling * (math.sqrt(rank) if config.use_rslora else rank)
    near = (config.lora_alpha, 2 * config.lora_alpha, round(alpha))
    return next((value for value in near if math.isclose(alpha, value, rel_tol=1e-12)), alpha)


def _modules_of(kept: Mapping[str, Any]) -> list[str]:
    found = {m for m, leaf in parsed_names(kept) if RANK_AXIS.get(leaf) == 0}
    return sorted(module for module in found if not module.endswith(HOLDERS))


def from_target_parameters(
    tensors: Mapping[str, Float32Array],
    config: AdapterConfig,
    where: object,
    arrangement: ExpertArrangement | None = None,
    *,
    stacking: Stacking,
) -> tuple[Tensors, AdapterConfig]:
    """Converts an adapter with PEFT's ``target_parameters`` to matrices for each expert.

    ``arrangement`` is that of ``to_target_parameters`` if it wrote the adapter; otherwise experts
    are stacked as ``stacking`` says. ``where`` is adapter_config.json.
    """
    of_base, stacking = stacking, stacking if arrangement is None else arrangement.stacking
    made: Tensors = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, int | float] = {}
    stacks: list[str] = []
    wrapped, plain = _wrapped(tensors, config, where, [*stacking.parameters])
    for name, array in tensors.items():
        parsed = parse_name(name)
        if parsed is None:
            made[name] = array
        elif parsed[0] not in wrapped:
            module = parsed[0]
            if module in plain:
                module = of_base.router_in_files(module)
            made[tensor_name(module, parsed[1])] = array
    weights = {of_base.router_in_files(module): f"{module}.weight" for module in plain}
    others = [*weights, *_other_targets(config, made, stacking)]
    for module, weight in weights.items():
        own, alpha = config.rank_of(weight), config.alpha_of(weight)
        if arrangement is None and (own, alpha) != (
            config.rank_of(module),
            config.alpha_of(module),
        ):
            ranks[re.escape(module)], alphas[re.escape(module)] = own, alpha
    for module, (held, parameter) in wrapped.items():
        full, at, held_kinds = (
            f"{held}.{parameter}",
            stacking.in_files(held),
            stacking.parameters[parameter],
        )
        rank, scaling = config.rank_of(full), config.scaling_of(full)
        pair = _by_expert(tensors, module, rank, where)
        if arrangement is not None:
            kinds = [kind for kind in held_kinds if kind in arrangement.kinds]
            modules = {kind: layer_name(at, 0, kind, stacking) for kind in kinds}
            ranks_of = {kind: config.rank_of(name) for kind, name in modules.items()}
            if rank != sum(ranks_of.values()):
                raise CheckpointError(
                    f"{where}: {full} has rank {rank}, which does not match {', '.join(kinds)}"
                )
            factors = {kind: scaling / config.scaling_of(name) for kind, name in modules.items()}
            parts = _parted(pair, ranks_of, factors, held_kinds, in_turns=stacking.in_turns)
        else:
            parts = _parted_by_zeros(held_kinds, pair, in_turns=stacking.in_turns)
        for kind, (a, b) in parts.items():
            leaf = stacking.leaves[stacking.kinds.index(kind)]
            stacks.append(f"{at}.{leaf}")
            own = a.shape[1]
            alpha = alpha_for(scaling, own, config)
            if arrangement is None and (own, alpha) != (config.r, config.lora_alpha):
                ranks[rf"{re.escape(at)}\.\d+\.{leaf}"] = own
                alphas[rf"{re.escape(at)}\.\d+\.{leaf}"] = alpha
            for expert in range(len(a)):
                layer = layer_name(at, expert, kind, stacking)
                made[tensor_name(layer, LORA_A)] = np.ascontiguousarray(a[expert])
                made[tensor_name(layer, LORA_B)] = np.ascontiguousarray(b[expert])
    written = {re.escape(f"{at}.{p}") for at, p in wrapped.values()}
    written |= {re.escape(weight) for weight in weights.values()}
    return made, replace(
        config,
        target_modules=sorted({*others, *stacks}),
        target_parameters=None,
        rank_pattern=ranks | {k: v for k, v in config.rank_pattern.items() if k not in written},
        alpha_pattern=alphas | {k: v for k, v in config.alpha_pattern.items() if k not in written},
    )


def _other_targets(config: AdapterConfig, kept: Mapping[str, Any], stacking: Stacking) -> list[str]:
    """Target modules that name the other layers, but no expert with the same last name."""
    if isinstance(config.target_modules, str):
        return _modules_of(kept)
    names: list[str] = []
    for name in config.target_modules:
        if name.rpartition(".")[2] in stacking.leaves:
            names += [module for module in _modules_of(kept) if is_named(module, name)]
        elif not name.endswith(HOLDERS):
            names.append(name)
    return names


def _wrapped(
    tensors: Mapping[str, Float32Array],
    config: AdapterConfig,
    where: object,
    parameters: Sequence[str],
) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """The adapted parameters of experts by wrapped module, and the layers with named weights."""
    modules = {module for module, _ in parsed_names(tensors)}
    names = config.target_parameters or []
    found: dict[str, tuple[str, str]] = {}
    for at in sorted({m.removesuffix(INNER) for m in modules if m.endswith(HOLDERS)}):
        own = [p for p in parameters if any(is_named(f"{at}.{p}", name) for name in names)]
        for parameter in own:
            found[_wrapping(at, parameter, own)] = at, parameter
    every = _modules_of(tensors)
    plain = [m for m in every if any(is_named(f"{m}.weight", name) for name in names)]
    full = [f"{at}.{p}" for at, p in found.values()] + [f"{m}.weight" for m in plain]
    odd = [n for n in names if not any(is_named(parameter, n) for parameter in full)]
    # PEFT ignores names that match nothing: its all-linear names routers that do not exist.
    modules_held = {module.removesuffix(INNER) for module in modules}
    owners = {name: name.rpartition(".")[0] for name in odd}
    odd = [n for n in odd if not owners[n] or any(is_named(m, owners[n]) for m in modules_held)]
    if odd or not modules >= found.keys():
        raise UnsupportedModelError(
            f"{where}: target_parameters names {(odd or sorted(found.keys() - modules))[0]}, which "
            "is not supported (supported: experts' {' and '.join(parameters)}, and the weights of "
            "adapted layers)"
        )
    return found, plain


def _by_expert(tensors: Mapping[str, Float32Array], module: str, rank: int, where: object) -> Pair:
    try:
        a, b = (tensors[tensor_name(module, leaf)] for leaf in (LORA_A, LORA_B))
    except KeyError as err:
        raise CheckpointError(f"{where}: {err.args[0]!r} is missing") from None
    if a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1] or len(a) % rank or not a.size:
        raise CheckpointError(
            f"{where}: {module} has matrices of shapes {a.shape} and {b.shape}, expected "
            f"({rank} · experts, in_features) and (out_features, {rank} · experts) for r = {rank}"
        )
    return a.reshape(-1, rank, a.shape[1]), np.moveaxis(b.reshape(len(b), rank, -1), 2, 0)
