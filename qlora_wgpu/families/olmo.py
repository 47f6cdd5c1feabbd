"""OLMo 1 (Ai2, 2024): as Llama, with norms without weights; 7B clips queries, keys and values."""

from qlora_wgpu.families import parts

EPS = 1e-5
"""Not in config.json."""


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """``clip_qkv`` is the maximum magnitude of queries, keys and values."""
    dimensions = parts.Dimensions.read(read)
    attention = parts.read_attention(
        read,
        dimensions,
        parts.read_rope(read.config, dimensions.head_dim),
        clip=read.softcap("clip_qkv"),
    )
    mlp = parts.GatedMLP(dimensions, parts.read_activation(read))
    norm = parts.LayerNorm(EPS, bias=False, weight=False)
    return parts.read_decoder(read, norm, parts.Layer(norm, attention, mlp), pad_token_id=1)
