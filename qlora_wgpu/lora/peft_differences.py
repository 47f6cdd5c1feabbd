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
    stacked = {spec.name for stack in experts for spec in stack.linears}
    names = {spec.name for spec in targets}
    differences = []
    if config.use_rslora and names & stacked:
        differences.append(
            "PEFT 0.21 with transformers 5 stacks the experts' gate and up, and scales their "
            "adapters by alpha / sqrt(2 r) times two under use_rslora: 1.41 times what was "
            "trained; merge the adapter, or train with use_rslora false"
        )
    leaves = {stack.leaf for stack in experts}
    if dense := sorted(n for n in names - stacked if n.rpartition(".")[2] in leaves):
        differences.append(
            f"PEFT 0.21 with transformers 5 takes {dense[0]} ({len(dense)} such layers) for "
            "experts, by its name, and leaves its adapter out: merge the adapter, or leave "
            "these layers out of lora.target_modules"
        )
    return differences
