"""Command R7B and Command A (Cohere, 2024): as Command R, most layers with sliding windows."""

from dataclasses import replace

from qlora_wgpu.families import parts


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Layers with full attention have no positions."""
    read = read.with_defaults(sliding_window=4096)
    dimensions = parts.Dimensions.read(read)
    attention = parts.read_attention(
        read, dimensions, parts.read_rope(read.config, dimensions.head_dim), interleaved=True
    )
    mlp = parts.GatedMLP(dimensions, parts.read_activation(read))
    norm = parts.LayerNorm(read.number("layer_norm_eps", 1e-5), bias=False)
    attentions = [
        replace(attention, rope=None) if window is None else replace(attention, window=window)
        for window in parts.periodic_windows(read, dimensions.num_hidden_layers, every=4)
    ]
    layers = [parts.Layer(norm, each, mlp, parts.PARALLEL) for each in attentions]
    return parts.read_decoder(
        read,
        norm,
        layers,
        ties=True,
        pad_token_id=0,
        logit_scale=read.number("logit_scale", 0.0625),
    )
