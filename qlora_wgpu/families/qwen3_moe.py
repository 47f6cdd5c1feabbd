"""Qwen 3 as a mixture of experts (Yang et al., 2025): Qwen3-30B-A3B, Qwen3-Coder and others."""

from __future__ import annotations

from qlora_wgpu.families.parts.attention import Attention, QKNorm
from qlora_wgpu.families.parts.config import ConfigReader, Dimensions
from qlora_wgpu.families.parts.decoder import Decoder, DecoderFamily, Layer
from qlora_wgpu.families.parts.mlp import GatedMLP, read_activation
from qlora_wgpu.families.parts.moe import (
    Experts,
    read_balance_loss,
    read_expert_counts,
    sparse_layers,
)
from qlora_wgpu.families.parts.norm import RMSNorm
from qlora_wgpu.families.parts.rope import read_rope


def compose(read: ConfigReader) -> Decoder:
    """Qwen 3 with some or all MLPs mixtures; where one layer has a window, all do."""
    read.no_dropout("attention_dropout")
    dimensions = Dimensions.read(read)
    eps, bias = read.number("rms_norm_eps", 1e-6), read.flag("attention_bias")
    attention = Attention(
        dimensions,
        read_rope(read.config, dimensions.head_dim),
        window=_window(read),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=QKNorm(eps),
    )
    mlp, experts = GatedMLP(dimensions, read_activation(read)), _experts(read, dimensions)
    norm = RMSNorm(eps)
    return Decoder(
        dimensions,
        norm,
        layers=tuple(
            Layer(norm, attention, experts if sparse else mlp)
            for sparse in sparse_layers(read, dimensions.num_hidden_layers)
        ),
        tied=read.flag("tie_word_embeddings"),
        balance=read_balance_loss(read),
    )


def _window(read: ConfigReader) -> int | None:
    read = read.with_defaults(sliding_window=4096)
    return read.optional_integer("sliding_window") if read.flag("use_sliding_window") else None


def _experts(read: ConfigReader, dimensions: Dimensions) -> Experts:
    num_experts, num_experts_per_tok = read_expert_counts(read, 128, 8)
    return Experts(
        dimensions.hidden_size,
        read.integer("moe_intermediate_size", 768),
        read_activation(read),
        num_experts,
        num_experts_per_tok,
        norm_topk_prob=read.flag("norm_topk_prob"),
    )


FAMILY = DecoderFamily(compose)
