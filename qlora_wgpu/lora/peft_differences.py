"""What PEFT computes otherwise than an adapter was trained, for its user to know."""

from __future__ import annotations

from collections.abc import Sequence

from qlora_wgpu.families.family import ExpertSpec, LinearSpec
from qlora_wgpu.lora.adapter_config import AdapterConfig


def peft_differences(
    config: AdapterConfig, targets: Sequence[LinearSpec], experts: Sequence[ExpertSpec]
) -> list[str]:
    """A sentence for each difference of PEFT 0.21 on transformers 5, which stacks experts.

    Args:
        config: The adapter.
        targets: The adapted layers.
        experts: The model's experts.
    """
    experts = [stack for stack in experts if not stack.in_turns]  # adapted as PEFT has them
    stacked = {spec.name for stack in experts for spec in stack.linears}
    names = {spec.name for spec in targets}
    if any(not stack.fused for stack in experts):
        return _alone(sorted(names & stacked))
    differences = []
    if config.use_rslora and names & stacked:
        differences.append(
            "PEFT 0.21 with transformers 5 stacks the experts' gate and up, and scales their "
            "adapters by alpha / sqrt(2 r) times two under use_rslora: 1.41 times what was "
            "trained; merge the adapter, or train with use_rslora false"
        )
    differences += _fused(names, experts)
    leaves = {stack.leaf for stack in experts}
    if dense := sorted(n for n in names - stacked if n.rpartition(".")[2] in leaves):
        differences.append(
            f"PEFT 0.21 with transformers 5 takes {dense[0]} ({len(dense)} such layers) for "
            "experts, by its name, and leaves its adapter out: merge the adapter, or leave "
            "these layers out of lora.target_modules"
        )
    return differences


def _alone(adapted: Sequence[str]) -> list[str]:
    """What becomes of experts' adapters where PEFT does not know that they are stacked."""
    if not adapted:
        return []
    return [
        f"PEFT 0.21 with transformers 5 has no place for {adapted[0]} ({len(adapted)} layers of "
        "experts), which it stacks, and leaves their adapters out: merge the adapter, or leave "
        "experts out of lora.target_modules"
    ]


def _fused(names: set[str], experts: Sequence[ExpertSpec]) -> list[str]:
    """What becomes of the experts' gate and up, which PEFT takes for one matrix, if not all are in.

    A layer's stacks are those of gate, up and down, in that order.
    """
    layers: dict[str, list[ExpertSpec]] = {}
    for stack in experts:
        layers.setdefault(stack.at, []).append(stack)
    told = {_fused_in(names, stacks) for stacks in layers.values() if len(stacks) == 3}
    return sorted(told - {""})


def _fused_in(names: set[str], stacks: Sequence[ExpertSpec]) -> str:
    gate, up, down = (stack.leaf for stack in stacks)
    has = [stack.linears[0].name in names for stack in stacks]
    if has[0] != has[1]:
        alone, other = (gate, up) if has[0] else (up, gate)
        return (
            f"PEFT 0.21 with transformers 5 refuses to load adapters of the experts' {alone} "
            f"without {other}, since it fuses the two: merge the adapter, or name both in "
            "lora.target_modules"
        )
    if has == [True, True, False]:
        return (
            f"PEFT 0.21 with transformers 5 leaves out adapters of the experts' {gate} and {up} "
            f"where {down} has none: merge the adapter, or name all three in lora.target_modules"
        )
    return ""
