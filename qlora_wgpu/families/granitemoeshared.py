"""Granite as mixtures of experts with a shared MLP (IBM, 2025)."""

from dataclasses import replace

from qlora_wgpu.families import parts
from qlora_wgpu.families.granite import compose_with
from qlora_wgpu.families.granitemoe import read_experts, shared_mlp


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """As Granite's mixtures; there is no shared MLP if its size is 0."""
    dimensions = parts.Dimensions.read(read)
    size = read.count("shared_intermediate_size", 0)
    shared = shared_mlp(dimensions, size, parts.read_activation(read)) if size else None
    experts = read_experts(read, dimensions, shared)
    rope = parts.read_rope(read.config, dimensions.head_dim)
    return replace(
        compose_with(read, dimensions, experts, rope), balance=parts.read_balance_loss(read)
    )
