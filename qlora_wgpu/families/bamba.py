"""Bamba (IBM, Princeton, CMU and UIUC, 2024): Mamba 2 in most layers, attention in the others."""

from collections.abc import Mapping
from typing import Any

from qlora_wgpu.errors import UnsupportedModelError, brief
from qlora_wgpu.families import parts

ORDER = parts.ResidualOrder(before_attention="input_layernorm", before_mlp="pre_ff_layernorm")
SILU = ("silu", "swish")


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """``attn_layer_indices`` selects the layers with attention; half of each head is rotated."""
    read = read.with_defaults(num_key_value_heads=8, intermediate_size=14336)
    dimensions = parts.Dimensions.read(read)
    # The convolution applies the MLP's activation, and supports SiLU alone.
    read.choice("hidden_act", SILU, "silu")
    norm = parts.RMSNorm(read.number("rms_norm_eps", 1e-5))
    mamba = parts.read_mamba(read, dimensions, eps=norm.eps)
    rope = parts.read_rope(_half(read.config), dimensions.head_dim, default_partial=0.5)
    attention = parts.read_attention(read, dimensions, rope)
    mlp = parts.GatedMLP(dimensions, "silu", read.flag("mlp_bias"), name="feed_forward")
    layers = [
        parts.Layer(norm, attention if attends else mamba, mlp, ORDER)
        for attends in _attending(read, dimensions.num_hidden_layers)
    ]
    return parts.read_decoder(read, norm, layers, pad_token_id=0, final_norm="final_layernorm")


def _half(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The file without ``partial_rotary_factor``, which transformers ignores."""
    return {key: value for key, value in config.items() if key != "partial_rotary_factor"}


def _attending(read: parts.ConfigReader, layers: int) -> list[bool]:
    chosen = read.config.get("attn_layer_indices")
    chosen = [] if chosen is None else chosen
    if not isinstance(chosen, list) or not all(type(i) is int for i in chosen):
        raise UnsupportedModelError(
            f"config.json: attn_layer_indices must be layer indices, got {brief(chosen)}"
        )
    return [i in chosen for i in range(layers)]
