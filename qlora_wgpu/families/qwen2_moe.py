"""Qwen 1.5 and 2 as mixtures of experts (Yang et al., 2024): one expert is met by every token."""

from __future__ import annotations

from dataclasses import replace

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families.parts.attention import Attention, Windows, layer_windows
from qlora_wgpu.families.parts.config import ConfigReader, Dimensions
from qlora_wgpu.families.parts.decoder import Decoder, DecoderFamily, Layer
from qlora_wgpu.families.parts.mlp import GatedMLP, read_activation
from qlora_wgpu.families.parts.moe import (
    Experts,
    SharedExpert,
    read_balance_loss,
    read_expert_counts,
    sparse_layers,
)
from qlora_wgpu.families.parts.norm import RMSNorm
from qlora_wgpu.families.parts.rope import read_rope


def compose(read: ConfigReader) -> Decoder:
    """Qwen 2 with some or all MLPs mixtures; every other layer slides, if windows are used."""
    read.no_dropout("attention_dropout")
    dimensions = Dimensions.read(read)
    attention = Attention(
        dimensions,
        read_rope(read.config, dimensions.head_dim),
        qkv_bias=read.flag("qkv_bias", True),
    )
    mlp, experts = GatedMLP(dimensions, read_activation(read)), _experts(read, dimensions)
    norm = RMSNorm(read.number("rms_norm_eps", 1e-6))
    layers = dimensions.num_hidden_layers
    kinds = zip(_windows(read, layers), sparse_layers(read, layers), strict=True)
    return Decoder(
        dimensions,
        norm,
        layers=tuple(
            Layer(norm, replace(attention, window=window), experts if sparse else mlp)
            for window, sparse in kinds
        ),
        tied=read.flag("tie_word_embeddings"),
        balance=read_balance_loss(read),
    )


def _experts(read: ConfigReader, dimensions: Dimensions) -> Experts:
    num_experts, num_experts_per_tok = read_expert_counts(read, 60, 4)
    size = read.integer("shared_expert_intermediate_size", 5632)
    activation = read_activation(read)
    shared = replace(dimensions, intermediate_size=size)
    return Experts(
        dimensions.hidden_size,
        read.integer("moe_intermediate_size", 1408),
        activation,
        num_experts,
        num_experts_per_tok,
        norm_topk_prob=read.flag("norm_topk_prob"),
        fused=False,
        shared=SharedExpert(
            GatedMLP(shared, activation, name="mlp.shared_expert"), gate="mlp.shared_expert_gate"
        ),
    )


def _windows(read: ConfigReader, layers: int) -> Windows:
    """Every other layer slides below ``max_window_layers``, unless ``layer_types`` says it.

    Raises:
        UnsupportedModelError: If layers slide, but ``use_sliding_window`` denies it.
    """
    read = read.with_defaults(sliding_window=4096, max_window_layers=28)
    used = read.flag("use_sliding_window")
    below = read.number("max_window_layers", 28)
    windows = layer_windows(read, [used and i % 2 == 0 and i < below for i in range(layers)])
    if any(windows) and not used:
        raise UnsupportedModelError(
            "config.json: layer_types has layers that slide, but use_sliding_window is not true"
        )
    return windows


FAMILY = DecoderFamily(compose)
