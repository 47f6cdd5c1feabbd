"""Which layers get an adapter, and what PEFT calls them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from qlora_wgpu.config import ALL_LINEAR, LoraConfig
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.families.family import ExpertSpec, LinearSpec
from qlora_wgpu.lora.adapter_config import AdapterConfig

_LAYER = re.compile(r".*?\.[^.]*\.(\d+)\.")


def targeted(
    linears: Sequence[LinearSpec],
    wanted: str | Sequence[str],
    experts: Sequence[ExpertSpec] = (),
) -> list[LinearSpec]:
    """The layers that get an adapter, matched as PEFT does: a whole name or its last parts.

    Experts get one where they are named, all of a layer's or none.

    Raises:
        ConfigError: If a name fits no layer.
    """
    if wanted == ALL_LINEAR:
        return list(linears)
    if isinstance(wanted, str):
        every = [*linears, *(spec for stack in experts for spec in stack.linears)]
        found = [s for s in every if re.fullmatch(wanted, s.name)]
        if not found:
            raise ConfigError(
                f"lora.target_modules: no adaptable layer's whole name fits {wanted!r}; one is "
                f"{linears[0].name}"
            )
        return found
    linears = [*linears, *(spec for stack in experts for spec in stack.linears)]
    chosen: set[str] = set()
    for target in wanted:
        fitting = {s.name for s in linears if s.name == target or s.name.endswith("." + target)}
        if not fitting:
            leaves = sorted({s.name.rpartition(".")[2] for s in linears})
            near = difflib.get_close_matches(target, leaves, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"this model has {', '.join(leaves)}"
            raise ConfigError(
                f"lora.target_modules: no adaptable layer is called {target!r}; {hint}"
            )
        chosen |= fitting
    check_stacks(chosen, experts)
    return [s for s in linears if s.name in chosen]


def in_layers(linears: Sequence[LinearSpec], layers: Sequence[int] | None) -> list[LinearSpec]:
    """Those of some layers, numbered in their names as PEFT reads them.

    Raises:
        ConfigError: If none is left.
    """
    if layers is None:
        return list(linears)
    found = [s for s in linears if (m := _LAYER.match(s.name)) and int(m[1]) in layers]
    if not found:
        raise ConfigError(
            f"lora.layers_to_transform {list(layers)} leaves no layer to adapt: they are numbered "
            "from 0 on"
        )
    return found


def check_stacks(chosen: set[str], experts: Sequence[ExpertSpec]) -> None:
    """Makes sure that a layer's experts are adapted all or not at all.

    Raises:
        ConfigError: If some are and others are not.
    """
    for stack in experts:
        missing = [s.name for s in stack.linears if s.name not in chosen]
        if missing and len(missing) < stack.experts:
            raise ConfigError(
                f"lora.target_modules: {missing[0]!r} is left out, but either all or none of a "
                f"layer's experts can be adapted: name {stack.leaf!r}"
            )


def peft_targets(wanted: str | Sequence[str], targets: Sequence[LinearSpec]) -> list[str] | str:
    """What adapter_config.json names: the user's list or pattern, or the layers' last names."""
    if wanted == ALL_LINEAR:
        return sorted({s.name.rpartition(".")[2] for s in targets})
    return wanted if isinstance(wanted, str) else sorted(wanted)


def lora_config(found: AdapterConfig) -> LoraConfig:
    """What a model is opened with to take an adapter."""
    return LoraConfig(
        r=found.r,
        lora_alpha=found.lora_alpha,
        lora_dropout=found.lora_dropout,
        target_modules=found.target_modules,
        use_rslora=found.use_rslora,
        use_dora=found.use_dora,
        rank_pattern=dict(found.rank_pattern),
        alpha_pattern=dict(found.alpha_pattern),
    )
