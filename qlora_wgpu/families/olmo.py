"""OLMo 1 (Ai2, 2024): as Llama, with norms that have no weights; 7B bounds queries to values."""

from qlora_wgpu.families import parts

EPS = 1e-5
"""No key says it."""


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """``clip_qkv`` is the largest magnitude of what q, k and v make."""
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
