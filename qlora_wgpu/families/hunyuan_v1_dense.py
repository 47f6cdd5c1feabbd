"""Hunyuan, dense (Tencent, 2025): as Llama, with q and k normalized after RoPE."""

from collections.abc import Mapping, Sequence
from typing import Any

from qlora_wgpu.errors import UnsupportedModelError, brief
from qlora_wgpu.families import parts


def compose(read: parts.ConfigReader) -> parts.Decoder:
    dimensions = parts.Dimensions.read(read)
    mlp = parts.GatedMLP(dimensions, parts.read_activation(read))
    return compose_with(read, dimensions, [mlp] * dimensions.num_hidden_layers)


def compose_with(
    read: parts.ConfigReader, dimensions: parts.Dimensions, mlps: Sequence[parts.Half]
) -> parts.Decoder:
    """RoPE of type 'dynamic' with an ``alpha`` does not depend on a sample's length."""
    eps = read.number("rms_norm_eps", 1e-5)
    qk_norm = parts.QKNorm(eps, names=("query_layernorm", "key_layernorm"), after_rope=True)
    attention = parts.read_attention(
        read, dimensions, _rope(read.config, dimensions.head_dim), qk_norm=qk_norm
    )
    norm = parts.RMSNorm(eps)
    layers = [parts.Layer(norm, attention, mlp) for mlp in mlps]
    return parts.read_decoder(read, norm, layers, pad_token_id=0)


def _rope(config: Mapping[str, Any], head_dim: int) -> parts.Rope:
    """RoPE, with the base multiplied by alpha^(d / (d - 2)) if there is an ``alpha``."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, Mapping) or not scaling.get("alpha"):
        return parts.read_rope(config, head_dim)
    alpha, kind = scaling["alpha"], scaling.get("rope_type", scaling.get("type"))
    if kind != "dynamic" or not parts.is_above_zero(alpha):
        raise UnsupportedModelError(
            f"config.json: RoPE's alpha {brief(alpha)} must be a positive number, and its type "
            f"'dynamic', got {brief(kind)}"
        )
    thetas = (scaling.get("rope_theta"), config.get("rope_theta"), 10_000.0)
    theta = next(value for value in thetas if value is not None)
    theta = parts.read_rope({"rope_theta": theta}, head_dim).theta  # which checks the base
    if head_dim <= 2:
        raise UnsupportedModelError(
            "config.json: RoPE of type 'dynamic' requires more than one pair"
        )
    return parts.read_rope({"rope_theta": theta * alpha ** (head_dim / (head_dim - 2))}, head_dim)
