"""Youtu-LLM (Tencent, 2025): latent attention as in DeepSeek-V3, with dense layers."""

from qlora_wgpu.families import parts
from qlora_wgpu.families.deepseek_v3 import SIZES


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Embedding and head are tied by default."""
    read.no_dropout("attention_dropout")
    read = read.with_defaults(num_key_value_heads=16)
    attention = parts.read_latent_attention(read, SIZES, q_rank=1536)
    mlp = parts.GatedMLP(attention.dimensions, parts.read_activation(read))
    norm = parts.RMSNorm(read.number("rms_norm_eps", 1e-6))
    return parts.read_decoder(read, norm, parts.Layer(norm, attention, mlp), ties=True)
