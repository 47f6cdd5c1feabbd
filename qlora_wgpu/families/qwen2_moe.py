"""Qwen 1.5 and 2 as mixtures of experts with a shared expert (Yang et al., 2024)."""

from dataclasses import replace

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families import parts


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Qwen 2 with experts in some or all layers; every other layer slides, if windows are used."""
    read.no_dropout("attention_dropout")
    dimensions = parts.Dimensions.read(read)
    attention = parts.Attention(
        dimensions,
        parts.read_rope(read.config, dimensions.head_dim),
        qkv_bias=read.flag("qkv_bias", True),
    )
    activation = parts.read_activation(read)
    mlp = parts.GatedMLP(dimensions, activation)
    normalized = read.flag("norm_topk_prob")
    experts = read_experts(
        read, dimensions, activation, (60, 4), (1408, 5632), normalized=normalized
    )
    experts = replace(experts, fused=False)
    norm = parts.RMSNorm(read.number("rms_norm_eps", 1e-6))
    count = dimensions.num_hidden_layers
    kinds = zip(_windows(read, count), parts.sparse_layers(read, count), strict=True)
    layers = [
        parts.Layer(norm, replace(attention, window=window), experts if sparse else mlp)
        for window, sparse in kinds
    ]
    return parts.read_decoder(read, norm, layers, balance=parts.read_balance_loss(read))


def read_experts(
    read: parts.ConfigReader,
    dimensions: parts.Dimensions,
    activation: str,
    counts: tuple[int, int],
    sizes: tuple[int, int],
    *,
    normalized: bool,
) -> parts.SparseMoeBlock:
    """Experts with a gated shared expert; ``counts`` and ``sizes`` are defaults."""
    size, of_shared = sizes
    of_shared = read.integer("shared_expert_intermediate_size", of_shared)
    shared = replace(dimensions, intermediate_size=of_shared)
    return parts.SparseMoeBlock(
        dimensions.hidden_size,
        read.integer("moe_intermediate_size", size),
        activation,
        *parts.read_expert_counts(read, *counts),
        norm_topk_prob=normalized,
        shared=parts.SharedExpert(
            parts.GatedMLP(shared, activation, name="mlp.shared_expert"),
            gate="mlp.shared_expert_gate",
        ),
    )


def _windows(read: parts.ConfigReader, layers: int) -> parts.Windows:
    """By default, every other layer slides below ``max_window_layers``."""
    read = read.with_defaults(sliding_window=4096, max_window_layers=28)
    used = read.flag("use_sliding_window")
    below = read.number("max_window_layers", 28)
    windows = parts.layer_windows(read, [used and i % 2 == 0 and i < below for i in range(layers)])
    if any(windows) and not used:
        raise UnsupportedModelError(
            "config.json: layer_types has sliding layers, but use_sliding_window is not true"
        )
    return windows
