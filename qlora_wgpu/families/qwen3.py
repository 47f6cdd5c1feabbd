"""Qwen 3 (Yang et al., 2025): as Llama, with normalized queries and keys."""

from dataclasses import replace

from qlora_wgpu.families import parts


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Layers from ``max_window_layers`` on slide, if windows are used."""
    dimensions = parts.Dimensions.read(read, head_dim=128)
    windows = parts.upper_windows(read, dimensions.num_hidden_layers)
    rope = parts.read_rope(read.config, dimensions.head_dim)
    eps = read.number("rms_norm_eps", 1e-6)
    attention = parts.read_attention(read, dimensions, rope, qk_norm=parts.QKNorm(eps))
    mlp = parts.GatedMLP(dimensions, parts.read_activation(read))
    norm = parts.RMSNorm(eps)
    layers = [parts.Layer(norm, replace(attention, window=w), mlp) for w in windows]
    return parts.read_decoder(read, norm, layers)
