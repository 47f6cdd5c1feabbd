"""Granite as mixtures of experts with an MLP that every token meets (IBM, 2025)."""

from __future__ import annotations

from dataclasses import replace

from qlora_wgpu.families.granite import compose_with
from qlora_wgpu.families.granitemoe import read_experts, shared_mlp
from qlora_wgpu.families.parts.config import ConfigReader, Dimensions
from qlora_wgpu.families.parts.decoder import Decoder, DecoderFamily
from qlora_wgpu.families.parts.mlp import read_activation
from qlora_wgpu.families.parts.moe import read_balance_loss
from qlora_wgpu.families.parts.rope import read_rope


def compose(read: ConfigReader) -> Decoder:
    """As Granite's mixtures; no MLP is shared where its size is 0."""
    dimensions = Dimensions.read(read)
    size = read.count("shared_intermediate_size", 0)
    shared = shared_mlp(dimensions, size, read_activation(read)) if size else None
    experts = read_experts(read, dimensions, shared)
    rope = read_rope(read.config, dimensions.head_dim)
    return replace(compose_with(read, dimensions, experts, rope), balance=read_balance_loss(read))


FAMILY = DecoderFamily(compose)
