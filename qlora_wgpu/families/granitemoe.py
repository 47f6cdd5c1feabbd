"""Granite 3 as mixtures of experts (IBM, 2024): Granite-3.1-1B-A400M, 3B-A800M, PowerMoE."""

from dataclasses import replace

from qlora_wgpu.families import parts
from qlora_wgpu.families.granite import compose_with


def compose(read: parts.ConfigReader) -> parts.Decoder:
    dimensions = parts.Dimensions.read(read)
    rope = parts.read_rope(read.config, dimensions.head_dim)
    decoder = compose_with(read, dimensions, read_experts(read, dimensions), rope)
    return replace(decoder, balance=parts.read_balance_loss(read))


def read_experts(
    read: parts.ConfigReader,
    dimensions: parts.Dimensions,
    shared: parts.FusedGatedMLP | None = None,
) -> parts.SparseMoeBlock:
    """The experts, whose weights sum to one for each token."""
    count, top = read.integer("num_local_experts", 8), read.integer("num_experts_per_tok", 2)
    parts.check_expert_counts(read, ("num_local_experts", count), ("num_experts_per_tok", top))
    return parts.SparseMoeBlock(
        dimensions.hidden_size,
        dimensions.intermediate_size,
        parts.read_activation(read),
        count,
        top,
        name="block_sparse_moe",
        router="router.layer",
        router_held="router",
        fused=False,
        shared=None if shared is None else parts.SharedExpert(shared),
    )


def shared_mlp(dimensions: parts.Dimensions, size: int, activation: str) -> parts.FusedGatedMLP:
    return parts.FusedGatedMLP(
        replace(dimensions, intermediate_size=size),
        activation,
        name="shared_mlp",
        leaves=("input_linear", "output_linear"),
    )
