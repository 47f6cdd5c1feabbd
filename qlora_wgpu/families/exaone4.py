"""EXAONE 4 (LG AI Research, 2025): post-norms; only layers with a sliding window use RoPE."""

from dataclasses import replace

from qlora_wgpu.families import parts


def compose(read: parts.ConfigReader) -> parts.Decoder:
    read = read.with_defaults(sliding_window=4096)
    dimensions = parts.Dimensions.read(read)
    norm = parts.RMSNorm(read.number("rms_norm_eps", 1e-5))
    mlp = parts.GatedMLP(dimensions, parts.read_activation(read))
    layers = [
        parts.Layer(norm, each, mlp, parts.POST_NORM)
        for each in read_attentions(read, dimensions, norm.eps)
    ]
    return parts.read_decoder(read, norm, layers)


def read_attentions(
    read: parts.ConfigReader, dimensions: parts.Dimensions, eps: float
) -> list[parts.Attention]:
    """By default, three of four layers slide; without a window, all use RoPE."""
    read.no_dropout("attention_dropout")
    rope = parts.read_rope(read.config, dimensions.head_dim)
    attention = parts.Attention(dimensions, rope, qk_norm=parts.QKNorm(eps))
    unrotated = (
        attention if read.config["sliding_window"] is None else replace(attention, rope=None)
    )
    return [
        unrotated if window is None else replace(attention, window=window)
        for window in parts.periodic_windows(read, dimensions.num_hidden_layers, every=4)
    ]
