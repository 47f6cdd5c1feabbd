"""gpt-oss (OpenAI, 2025): attention with sinks, experts with biases."""

from dataclasses import replace

from qlora_wgpu.families import parts

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The default RoPE."""


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Every other layer slides, starting with the first; expert weights sum to one."""
    read = read.with_defaults(head_dim=64, num_key_value_heads=8, sliding_window=128)
    if read.config.get("rope_parameters") is None:
        read = parts.ConfigReader({**read.config, "rope_parameters": YARN})
    dimensions = parts.Dimensions.read(read)
    attention = parts.read_attention(
        read,
        dimensions,
        parts.read_rope(read.config, dimensions.head_dim, default_theta=150_000.0),
        bias=True,
        sinks=True,
    )
    experts = parts.SparseMoeBlock(
        dimensions.hidden_size,
        dimensions.intermediate_size,
        parts.read_clamped_glu(read),
        *parts.read_expert_counts(read, 128, 4),
        norm_topk_prob=True,
        router="router",
        bias=True,
        in_turns=True,
    )
    norm = parts.RMSNorm(read.number("rms_norm_eps", 1e-5))
    slides = [i % 2 == 0 for i in range(dimensions.num_hidden_layers)]
    windows = parts.layer_windows(read, slides)
    layers = [parts.Layer(norm, replace(attention, window=window), experts) for window in windows]
    return parts.read_decoder(read, norm, layers, balance=parts.read_balance_loss(read))
