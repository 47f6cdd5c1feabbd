"""Ministral 3 (Mistral AI, 2025): as Mistral, with queries scaled up with their position."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qlora_wgpu.errors import UnsupportedModelError, brief
from qlora_wgpu.families import parts

ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Hugging Face's defaults."""


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Every layer slides, if there is a window."""
    read = read.with_defaults(num_key_value_heads=8, head_dim=128)
    read.no_dropout("attention_dropout")
    dimensions = parts.Dimensions.read(read)
    keys, queries = _ropes(read.config, dimensions.head_dim)
    window = read.optional_integer("sliding_window")
    attention = parts.Attention(dimensions, keys, window, query_rope=queries)
    mlp = parts.GatedMLP(dimensions, parts.read_activation(read))
    norm = parts.RMSNorm(read.number("rms_norm_eps", 1e-5))
    return parts.read_decoder(read, norm, parts.Layer(norm, attention, mlp), pad_token_id=11)


def _ropes(config: Mapping[str, Any], head_dim: int) -> tuple[parts.Rope, parts.Rope]:
    """RoPE of keys, and of queries, which also scales them."""
    given = config.get("rope_scaling") or config.get("rope_parameters")
    if given is not None and not isinstance(given, Mapping):
        raise UnsupportedModelError(
            f"config.json: RoPE's parameters must be an object, got {brief(given)}"
        )
    parameters = dict(ROPE if given is None else given)
    beta = parameters.pop("llama_4_scaling_beta", None)
    parameters.pop("max_position_embeddings", None)  # transformers also ignores it here
    length = _original_length(config, parameters)
    if type(beta) not in (int, float) or not 0 <= beta < 2**24 or not parts.is_above_zero(length):
        raise UnsupportedModelError(
            "config.json: RoPE's parameters must have llama_4_scaling_beta >= 0 and "
            f"original_max_position_embeddings > 0, got {brief(beta)} and "
            f"{brief(length)}"
        )
    rope = parts.read_rope(
        {**config, "rope_scaling": None, "rope_parameters": parameters}, head_dim
    )
    return rope, replace(rope, growth=parts.Growth(beta, length))


def _original_length(config: Mapping[str, Any], parameters: Mapping[str, Any]) -> Any:
    """The model's original maximum of positions, as in transformers."""
    key = "original_max_position_embeddings"
    length = parameters.get(key)
    if parameters.get("rope_type", parameters.get("type")) not in ("yarn", "llama3", "longrope"):
        return length
    return config.get(key, config.get("max_position_embeddings") if length is None else length)
