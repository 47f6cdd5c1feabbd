"""Phi 3, 3.5 and 4-mini (Abdin et al., 2024): q, k and v fused, gate and up too."""

from qlora_wgpu.families import parts


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Every layer slides, if there is a window."""
    read.no_dropout("attention_dropout", "embd_pdrop", "resid_pdrop")
    read.choice("attention_bias", (None, False))
    dimensions = parts.Dimensions.read(read)
    # transformers has a default for the original length, which takes precedence over RoPE's keys.
    config = read.with_defaults(original_max_position_embeddings=4096).config
    rope = parts.read_rope(config, dimensions.head_dim, default_partial=1.0)
    window = read.optional_integer("sliding_window")
    attention = parts.Attention(dimensions, rope, window, fused=parts.FusedQKV())
    mlp = parts.FusedGatedMLP(dimensions, parts.read_activation(read))
    norm = parts.RMSNorm(read.number("rms_norm_eps", 1e-5))
    return parts.read_decoder(read, norm, parts.Layer(norm, attention, mlp), pad_token_id=32_000)
