"""Mistral (Jiang et al., 2023): as Llama, with a sliding window."""

from dataclasses import replace

from qlora_wgpu.families import parts


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Every layer slides, if there is a window."""
    read = read.with_defaults(sliding_window=4096)
    read.no_dropout("attention_dropout")
    dimensions = parts.Dimensions.read(read)
    slides = read.config["sliding_window"] is not None
    windows = parts.layer_windows(read, [slides] * dimensions.num_hidden_layers)
    attention = parts.Attention(dimensions, parts.read_rope(read.config, dimensions.head_dim))
    mlp = parts.GatedMLP(dimensions, parts.read_activation(read))
    norm = parts.RMSNorm(read.number("rms_norm_eps", 1e-6))
    layers = [parts.Layer(norm, replace(attention, window=w), mlp) for w in windows]
    return parts.read_decoder(read, norm, layers)
