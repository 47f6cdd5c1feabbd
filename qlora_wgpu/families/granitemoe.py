"""Granite 3 as mixtures of experts (IBM, 2024): Granite-3.1-1B-A400M, 3B-A800M, PowerMoE."""

from __future__ import annotations

from dataclasses import replace

from qlora_wgpu.families.granite import compose_with
from qlora_wgpu.families.parts.config import ConfigReader, Dimensions
from qlora_wgpu.families.parts.decoder import Decoder, DecoderFamily
from qlora_wgpu.families.parts.mlp import FusedGatedMLP, read_activation
from qlora_wgpu.families.parts.moe import (
    Experts,
    SharedExpert,
    check_expert_counts,
    read_balance_loss,
)
from qlora_wgpu.families.parts.rope import read_rope


def compose(read: ConfigReader) -> Decoder:
    """Every MLP is a mixture."""
    dimensions = Dimensions.read(read)
    rope = read_rope(read.config, dimensions.head_dim)
    decoder = compose_with(read, dimensions, read_experts(read, dimensions), rope)
    return replace(decoder, balance=read_balance_loss(read))


def read_experts(
    read: ConfigReader, dimensions: Dimensions, shared: FusedGatedMLP | None = None
) -> Experts:
    """The mixture; a token's experts' weights sum to one.

    Args:
        read: The config.json.
        dimensions: With the size of the experts.
        shared: What every token meets beside its experts, if anything.

    Raises:
        UnsupportedModelError: If a token would meet more than there are.
    """
    count, top = read.integer("num_local_experts", 8), read.integer("num_experts_per_tok", 2)
    check_expert_counts(read, ("num_local_experts", count), ("num_experts_per_tok", top))
    return Experts(
        dimensions.hidden_size,
        dimensions.intermediate_size,
        read_activation(read),
        count,
        top,
        name="block_sparse_moe",
        router="router.layer",
        fused=False,
        shared=None if shared is None else SharedExpert(shared),
    )


def shared_mlp(dimensions: Dimensions, size: int, activation: str) -> FusedGatedMLP:
    """The MLP beside the experts, or in their place."""
    return FusedGatedMLP(
        replace(dimensions, intermediate_size=size),
        activation,
        name="shared_mlp",
        leaves=("input_linear", "output_linear"),
    )


FAMILY = DecoderFamily(compose)
