"""OLMo 3 (Ai2, 2025): as OLMo 2, most layers with a sliding window and their own RoPE."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families import parts

THETA = 500_000.0


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """By default, three of four layers slide."""
    read = read.with_defaults(sliding_window=4096)
    dimensions = parts.Dimensions.read(read)
    eps = read.number("rms_norm_eps", 1e-5)
    far, near = _ropes(read, dimensions.head_dim)
    qk_norm = parts.QKNorm(eps, per_head=False)
    full = parts.read_attention(read, dimensions, far, qk_norm=qk_norm)
    mlp, norm = parts.GatedMLP(dimensions, parts.read_activation(read)), parts.RMSNorm(eps)
    slides = [(i + 1) % 4 != 0 for i in range(dimensions.num_hidden_layers)]
    attentions = [
        full if window is None else replace(full, rope=near, window=window)
        for window in parts.layer_windows(read, slides)
    ]
    layers = [parts.Layer(norm, attention, mlp, parts.POST_NORM) for attention in attentions]
    return parts.read_decoder(read, norm, layers, pad_token_id=1)


def _ropes(read: parts.ConfigReader, head_dim: int) -> tuple[parts.Rope, parts.Rope]:
    """RoPE of layers with full attention, and of those that slide.

    Keys for both kinds may only repeat the defaults: transformers 4 applies other values to both
    kinds, transformers 5 to the first kind or to none.
    """
    config, flat = read.config, _flat(read.config.get("rope_parameters"))
    if flat:
        config = {key: value for key, value in config.items() if key != "rope_parameters"}
    usual = {"rope_theta": THETA, "rope_type": "default", "type": "default"}
    is_usual = all(value == usual.get(key) for key, value in flat.items())
    has_both = config.get("rope_parameters") is not None
    if not is_usual or (not has_both and read.number("rope_theta", THETA) != THETA):
        raise UnsupportedModelError(
            "config.json: rope_theta and flat rope_parameters are ambiguous, since versions of "
            "transformers read them differently: set rope_parameters for full_attention and "
            "sliding_attention instead"
        )
    return parts.read_ropes_of_layers(config, head_dim, THETA, THETA)


def _flat(parameters: Any) -> dict[str, Any]:
    if not isinstance(parameters, Mapping) or {"full_attention", "sliding_attention"} & {
        *parameters
    }:
        return {}
    return {key: value for key, value in parameters.items() if value is not None}
