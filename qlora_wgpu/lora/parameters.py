"""Adapters on bare parameters, PEFT's ``target_parameters``: experts that a model holds together.

Where transformers has a layer's experts in one parameter, PEFT adapts it as one: of
``P.experts.gate_up_proj`` A is (r · experts, in_features), the experts' one below the other, and B
(out_features, r · experts), an expert's r columns ``experts`` apart. The module that holds the
parameters is wrapped once for each of them, gate_up_proj innermost: its matrices are called
``P.experts.base_layer.lora_A`` and those of down_proj ``P.experts.lora_A``, or so those of the only
one. Here every expert has matrices of its own for gate, up and down, by the names of its files
(``Stacking``): those of gate and up become parts of a rank that is their sum, and come apart again
where they are such parts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from qlora_wgpu.families.stacking import Stacking
from qlora_wgpu.lora.adapter_config import AdapterConfig
from qlora_wgpu.lora.expert_pairs import KINDS, PARAMETERS, Pair, stacked
from qlora_wgpu.lora.names import LORA_A, LORA_B, Float32Array, is_a, parse_name, tensor_name

ARRANGED = "adapted_experts"
"""Under which a file's metadata say what of its experts has matrices of its own, and how else."""

INNER = ".base_layer"
HOLDERS = (".experts", ".experts" + INNER)
"""How names of modules that hold experts end."""

Tensors = dict[str, Float32Array]


@dataclass(frozen=True)
class Arranged:
    """What of an adapter's experts ``together`` has put together.

    Attributes:
        kinds: Those of gate, up and down that have matrices of their own.
        stacking: How the base's experts are held.
    """

    kinds: tuple[str, ...]
    stacking: Stacking

    def to_text(self) -> str:
        """It as a file's metadata have it."""
        return f"{' '.join(self.kinds)}; {self.stacking.to_json()}"

    @classmethod
    def from_text(cls, text: str) -> Arranged:
        """It of ``to_text``'s text; without a stacking of gpt-oss, which was the first to have it.

        Raises:
            ValueError: If it is none.
        """
        kinds, told, stacking = text.partition(";")
        of_base = Stacking.from_json(stacking) if told else Stacking(in_turns=True)
        return cls(tuple(kinds.split()), of_base)


def together(
    tensors: Mapping[str, Float32Array], config: AdapterConfig, stacking: Stacking
) -> tuple[Tensors, AdapterConfig]:
    """An adapter as PEFT has it for experts that are held together, of one with each by itself.

    Layers that are called as an expert's are named by their parameters, too: PEFT would take their
    modules' names for experts'.

    Args:
        tensors: A and B by PEFT's names.
        config: Its settings.
        stacking: How the base's experts are held.
    """
    kept, experts = _sorted_out(tensors, stacking)
    ranks: dict[str, int] = {}
    alphas: dict[str, int | float] = {}
    targets = []
    for module in called_as_experts(kept, stacking):
        name = f"{module}.weight"
        targets.append(name)
        ranks[re.escape(name)] = config.rank_of(module)
        alphas[re.escape(name)] = config.alpha_of(module)
    for at, kinds in experts.items():
        present = [p for p, parts in PARAMETERS.items() if any(k in kinds for k in parts)]
        for parameter in present:
            own = {k: kinds[k] for k in PARAMETERS[parameter] if k in kinds}
            scalings = {k: config.scaling_of(layer_name(at, 0, k, stacking)) for k in own}
            scaling = next(iter(scalings.values()))
            a, b = stacked(own, scalings, len(PARAMETERS[parameter]), in_turns=stacking.in_turns)
            rank = a.shape[1]
            is_inner = parameter == "gate_up_proj" and len(present) > 1
            held = stacking.in_memory(at)
            module = held + INNER if is_inner else held
            kept[tensor_name(module, LORA_A)] = a.reshape(-1, a.shape[2])
            kept[tensor_name(module, LORA_B)] = np.moveaxis(b, 0, 2).reshape(b.shape[1], -1)
            name = f"{held}.{parameter}"
            targets.append(name)
            ranks[re.escape(name)] = rank
            alphas[re.escape(name)] = alpha_for(scaling, rank, config)
    return kept, replace(
        config,
        target_modules=_other_modules(kept, config, stacking),
        target_parameters=targets,
        rank_pattern={**ranks, **config.rank_pattern},  # the first that fits counts
        alpha_pattern={**alphas, **config.alpha_pattern},
        lora_dropout=0.0,  # with which PEFT wraps no parameter, and which says how it was trained
    )


def arranged(tensors: Mapping[str, Float32Array], stacking: Stacking) -> Arranged:
    """Which of gate, up and down have matrices of their own."""
    modules = [parsed[0] for name in tensors if (parsed := parse_name(name)) is not None]
    pattern = _expert(stacking)
    leaves = {match[3] for module in modules if (match := pattern.fullmatch(module))}
    pairs = zip(KINDS, stacking.leaves, strict=True)
    return Arranged(tuple(kind for kind, leaf in pairs if leaf in leaves), stacking)


def _pair(of_experts: Mapping[int, Mapping[str, Float32Array]]) -> Pair:
    pairs = [of_experts[i] for i in sorted(of_experts)]
    return np.stack([p[LORA_A] for p in pairs]), np.stack([p[LORA_B] for p in pairs])


def leaf_of(kind: str, stacking: Stacking) -> str:
    """What files call gate, up or down within an expert."""
    return stacking.leaves[KINDS.index(kind)]


def layer_name(at: str, expert: int, kind: str, stacking: Stacking) -> str:
    """What files call that layer of an expert."""
    return f"{at}.{expert}.{leaf_of(kind, stacking)}"


def _expert(stacking: Stacking) -> re.Pattern[str]:
    leaves = "|".join(map(re.escape, stacking.leaves))
    return re.compile(rf"(.*\.experts)\.(\d+)\.({leaves})")


def _sorted_out(
    tensors: Mapping[str, Float32Array], stacking: Stacking
) -> tuple[Tensors, dict[str, dict[str, Pair]]]:
    """What is no expert's, and by the module of experts what each kind has."""
    kept: Tensors = {}
    found: dict[str, dict[str, dict[int, dict[str, Float32Array]]]] = {}
    pattern = _expert(stacking)
    for name, array in tensors.items():
        parsed = parse_name(name)
        match = pattern.fullmatch(parsed[0]) if parsed is not None else None
        if parsed is None or match is None:
            kept[name] = array
            continue
        kind = KINDS[stacking.leaves.index(match[3])]
        experts = found.setdefault(match[1], {}).setdefault(kind, {})
        experts.setdefault(int(match[2]), {})[parsed[1]] = array
    experts_of = {
        at: {kind: _pair(of_experts) for kind, of_experts in kinds.items()}
        for at, kinds in found.items()
    }
    return kept, experts_of


def alpha_for(scaling: float, rank: int, config: AdapterConfig) -> int | float:
    """What PEFT divides by the rank, or its root, to that scaling."""
    alpha = scaling * (math.sqrt(rank) if config.use_rslora else rank)
    near = (config.lora_alpha, 2 * config.lora_alpha, round(alpha))
    return next((value for value in near if math.isclose(alpha, value, rel_tol=1e-12)), alpha)


def _other_modules(kept: Mapping[str, Any], config: AdapterConfig, stacking: Stacking) -> list[str]:
    """The target modules that are left; of a pattern, the layers themselves."""
    modules = [m for m in modules_of(kept) if m.rpartition(".")[2] not in stacking.leaves]
    if isinstance(config.target_modules, str):
        return modules
    names = config.target_modules
    return [n for n in names if any(is_named(m, n) for m in modules)]


def modules_of(kept: Mapping[str, Any]) -> list[str]:
    """The modules beside those that hold experts."""
    parsed = [p for name in kept if (p := parse_name(name)) is not None]
    return sorted({m for m, leaf in parsed if is_a(leaf) and not m.endswith(HOLDERS)})


def called_as_experts(kept: Mapping[str, Any], stacking: Stacking) -> list[str]:
    """Those of ``modules_of`` that are called as an expert's."""
    return [m for m in modules_of(kept) if m.rpartition(".")[2] in stacking.leaves]


def is_named(parameter: str, target: str) -> bool:
    """Whether a target names a parameter or a module: wholly, or by its last parts."""
    return parameter == target or parameter.endswith(f".{target}")
