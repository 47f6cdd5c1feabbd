"""Apertus (Swiss AI, 2025): as Llama, with normalized q and k, and an xIELU MLP."""

from qlora_wgpu.families import parts

ORDER = parts.ResidualOrder(
    before_attention="attention_layernorm", before_mlp="feedforward_layernorm"
)
THETA = 12_000_000.0
ROPE = {
    "rope_type": "llama3",
    "rope_theta": THETA,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
"""Hugging Face's defaults."""


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Only xIELU has scalars."""
    dimensions = parts.Dimensions.read(read)
    eps = read.number("rms_norm_eps", 1e-5)
    rope = _rope(read, dimensions.head_dim)
    attention = parts.read_attention(read, dimensions, rope, qk_norm=parts.QKNorm(eps))
    norm = parts.RMSNorm(eps)
    is_xielu = read.config.get("hidden_act", parts.XIELU) == parts.XIELU
    activation = parts.XIELU if is_xielu else parts.read_activation(read)
    mlp = parts.PlainMLP(dimensions, activation, bias=False)
    layer = parts.Layer(norm, attention, mlp, ORDER)
    return parts.read_decoder(read, norm, layer, pad_token_id=3)


def _rope(read: parts.ConfigReader, head_dim: int) -> parts.Rope:
    config = read.config
    if config.get("rope_parameters") is None and not config.get("rope_scaling"):
        config = {**config, "rope_parameters": ROPE}
    return parts.read_rope(config, head_dim, default_theta=THETA)
