"""Qwen 2 and 2.5 (Yang et al., 2024): as Llama, with biases on q, k and v."""

from dataclasses import replace

from qlora_wgpu.families import parts


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Layers from ``max_window_layers`` on slide, if windows are used."""
    read.no_dropout("attention_dropout")
    dimensions = parts.Dimensions.read(read)
    windows = parts.upper_windows(read, dimensions.num_hidden_layers)
    rope = parts.read_rope(read.config, dimensions.head_dim)
    attention = parts.Attention(dimensions, rope, qkv_bias=True)
    mlp = parts.GatedMLP(dimensions, parts.read_activation(read))
    norm = parts.RMSNorm(read.number("rms_norm_eps", 1e-6))
    layers = [parts.Layer(norm, replace(attention, window=w), mlp) for w in windows]
    return parts.read_decoder(read, norm, layers)
