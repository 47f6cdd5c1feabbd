"""Qwen 3.5 as a mixture of experts (Qwen team, 2026), text only."""

from dataclasses import replace

from qlora_wgpu.families import parts
from qlora_wgpu.families.qwen2_moe import read_experts
from qlora_wgpu.families.qwen3_5_text import STORED_PREFIXES
from qlora_wgpu.families.qwen3_next import SIZES, compose_hybrid, read_silu


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Every layer has experts; ``mlp_only_layers`` and similar keys are ignored."""
    read = parts.ConfigReader(parts.without_sections(read.config))
    # No layer has an MLP of this size.
    read = read.with_defaults(num_key_value_heads=2, head_dim=256, intermediate_size=1)
    dimensions = parts.Dimensions.read(read)
    experts = read_experts(read, dimensions, read_silu(read), (256, 8), SIZES, normalized=True)
    mlps: list[parts.Half] = [replace(experts, fused=False)] * dimensions.num_hidden_layers
    decoder = compose_hybrid(read, dimensions, mlps, fused=False)
    balance = parts.read_balance_loss(read)
    return replace(decoder, stored_prefixes=STORED_PREFIXES, balance=balance)
