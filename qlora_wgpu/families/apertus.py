"""Apertus (Swiss AI, 2025): as Llama, with normalized q and k, and an MLP by xIELU."""

from __future__ import annotations

from qlora_wgpu.families.parts.attention import Attention, QKNorm
from qlora_wgpu.families.parts.config import ConfigReader, Dimensions
from qlora_wgpu.families.parts.decoder import Decoder, DecoderFamily, Layer, ResidualOrder
from qlora_wgpu.families.parts.mlp import XIELUMLP, PlainMLP, read_activation
from qlora_wgpu.families.parts.norm import RMSNorm
from qlora_wgpu.families.parts.rope import Rope, read_rope

ORDER = ResidualOrder(before_attention="attention_layernorm", before_mlp="feedforward_layernorm")
THETA = 12_000_000.0
ROPE = {
    "rope_type": "llama3",
    "rope_theta": THETA,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
"""Hugging Face's, where a config.json has none."""


def compose(read: ConfigReader) -> Decoder:
    """Other activations than xIELU have no scalars."""
    read.no_dropout("attention_dropout")
    dimensions = Dimensions.read(read)
    bias, eps = read.flag("attention_bias"), read.number("rms_norm_eps", 1e-5)
    rope = _rope(read, dimensions.head_dim)
    attention = Attention(dimensions, rope, qkv_bias=bias, o_bias=bias, qk_norm=QKNorm(eps))
    norm = RMSNorm(eps)
    layer = Layer(norm, attention, _mlp(read, dimensions), ORDER)
    return Decoder(
        dimensions,
        norm,
        layers=(layer,) * dimensions.num_hidden_layers,
        tied=read.flag("tie_word_embeddings"),
        pad_token_id=3,
    )


def _mlp(read: ConfigReader, dimensions: Dimensions) -> XIELUMLP | PlainMLP:
    if read.config.get("hidden_act", "xielu") == "xielu":
        return XIELUMLP(dimensions)
    return PlainMLP(dimensions, read_activation(read), bias=False)


def _rope(read: ConfigReader, head_dim: int) -> Rope:
    config = read.config
    if config.get("rope_parameters") is None and not config.get("rope_scaling"):
        config = {**config, "rope_parameters": ROPE}
    return read_rope(config, head_dim, default_theta=THETA)


FAMILY = DecoderFamily(compose)
