"""How PEFT 0.21 on transformers 5, which stacks experts, reads an adapter of them.

It makes pairs of the stacks of those of experts for some model types (``ExpertSpec.fused``), and so
only where that is all: what else has to be written as PEFT has it (``parameters.together``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from qlora_wgpu.families.family import ExpertSpec, LinearSpec
from qlora_wgpu.lora.adapter_config import AdapterConfig


def is_written_together(
    config: AdapterConfig, targets: Sequence[LinearSpec], experts: Sequence[ExpertSpec]
) -> bool:
    """Whether an adapter of experts is written as one of the parameters that hold them.

    PEFT reads the experts' own where their model type is one that it knows, without dropout, of one
    scaling that is alpha / r, of gate, up and down or of down alone, by their last names, and where
    no other adapted layer is called so.

    Args:
        config: The adapter.
        targets: The adapted layers.
        experts: The model's experts.
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
    """A sentence for each thing that PEFT 0.21 computes otherwise.

    Args:
        config: The adapter.
        targets: The adapted layers.
        experts: The model's experts.
    """
    dense = _dense_as_experts({spec.name for spec in targets}, experts)
    if not dense or not config.use_dora:
        return []
    return [
        f"PEFT 0.21 with transformers 5 takes {dense[0]} ({len(dense)} such layers) for "
        "experts, by its name, and has no DoRA for these: merge the adapter, or leave "
        "these layers out of lora.target_modules"
    ]


def _dense_as_experts(names: Collection[str], experts: Sequence[ExpertSpec]) -> list[str]:
    """The adapted layers that are no experts, but which PEFT takes for some by their names."""
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
        and all(stack.leaf == stack.stacking.leaves[2] for stack in adapted)
    )
