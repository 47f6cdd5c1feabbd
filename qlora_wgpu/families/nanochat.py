"""nanochat (Karpathy, 2025): norms without weights, also of the embedding; squared ReLU."""

from dataclasses import replace

from qlora_wgpu.families import parts


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Queries and keys are normalized after RoPE, which rotates the other way."""
    dimensions = parts.Dimensions.read(read)
    norm = parts.RMSNorm(read.number("rms_norm_eps", 1e-6), weight=False)
    rope = parts.read_rope(read.config, dimensions.head_dim)
    attention = parts.read_attention(
        read,
        dimensions,
        replace(rope, frequencies=lambda length: -rope.frequencies(length)),
        qk_norm=parts.PlainQKNorm(norm.eps, dimensions.head_dim, after_rope=True),
    )
    activation = parts.read_activation(read, "relu2")
    mlp = parts.PlainMLP(dimensions, activation, bias=False, leaves=("fc1", "fc2"))
    return parts.read_decoder(
        read,
        norm,
        parts.Layer(norm, attention, mlp),
        pad_token_id=1,
        embedding_norm=norm.eps,
        logit_softcap=read.softcap("final_logit_softcapping", 15.0),
    )
