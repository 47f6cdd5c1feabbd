"""Granite with sliding windows (IBM, 2026): attention with sinks, each layer with its own RoPE."""

from collections.abc import Mapping
from dataclasses import replace

from qlora_wgpu.errors import UnsupportedModelError, brief
from qlora_wgpu.families import granite, parts


def compose(read: parts.ConfigReader) -> parts.Decoder:
    read = read.with_defaults(num_key_value_heads=4, rms_norm_eps=1e-5, tie_word_embeddings=True)
    return sliding(read, granite.compose(read))


def sliding(read: parts.ConfigReader, decoder: parts.Decoder) -> parts.Decoder:
    """The same decoder with sinks, windows and RoPE of each layer.

    By default, every fourth layer has full attention, starting with the first.
    """
    read = read.with_defaults(sliding_window=128)
    slides = [i % 4 != 0 for i in range(len(decoder.layers))]
    ropes = _ropes(read, decoder)
    layers = []
    places = zip(decoder.layers, parts.layer_windows(read, slides), ropes, strict=True)
    for layer, window, rope in places:
        assert isinstance(layer.attention, parts.Attention)
        attention = replace(layer.attention, window=window, rope=rope, sinks=True)
        layers.append(replace(layer, attention=attention))
    return replace(decoder, layers=tuple(layers))


def _ropes(read: parts.ConfigReader, decoder: parts.Decoder) -> list[parts.Rope | None]:
    """RoPE of each layer by its base in ``layer_rope_theta``, where 0 means no positions."""
    config, count, head_dim = read.config, len(decoder.layers), decoder.dimensions.head_dim
    thetas = config.get("layer_rope_theta")
    if thetas is None:
        return [parts.read_rope(config, head_dim)] * count
    if not isinstance(thetas, list) or len(thetas) != count or not all(map(_is_theta, thetas)):
        raise UnsupportedModelError(
            f"config.json: layer_rope_theta must have 0 or a positive number for each of the "
            f"{count} layers, got {brief(thetas)}"
        )
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping):
        raise UnsupportedModelError(
            f"config.json: RoPE's parameters must be an object, got {brief(scaling)}"
        )
    ropes = {
        theta: parts.read_rope(
            {**config, "rope_scaling": None, "rope_parameters": {**scaling, "rope_theta": theta}},
            head_dim,
        )
        for theta in set(thetas)
        if theta
    }
    return [ropes.get(theta) for theta in thetas]


def _is_theta(theta: object) -> bool:
    return type(theta) in (int, float) and (theta == 0 or parts.is_above_zero(theta))
