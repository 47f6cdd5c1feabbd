"""SmolLM 3 (Hugging Face, 2025): as Llama, but some layers have no positions."""

from dataclasses import replace

from qlora_wgpu.errors import UnsupportedModelError, brief
from qlora_wgpu.families import parts


def compose(read: parts.ConfigReader) -> parts.Decoder:
    dimensions = parts.Dimensions.read(read)
    rope = parts.read_rope(read.config, dimensions.head_dim, default_theta=2_000_000.0)
    attention = parts.read_attention(read, dimensions, rope)
    mlp = parts.GatedMLP(dimensions, parts.read_activation(read), read.flag("mlp_bias"))
    norm = parts.RMSNorm(read.number("rms_norm_eps", 1e-6))
    rotated = _rotated_layers(read, dimensions.num_hidden_layers)
    slides = read.flag("use_sliding_window") and read.config.get("sliding_window") is not None
    windows = parts.layer_windows(read, [slides and not turns for turns in rotated])
    layers = [
        parts.Layer(norm, replace(attention, rope=rope if turns else None, window=window), mlp)
        for turns, window in zip(rotated, windows, strict=True)
    ]
    return parts.read_decoder(read, norm, layers, ties=True, pad_token_id=128_004)


def _rotated_layers(read: parts.ConfigReader, layers: int) -> list[bool]:
    """``no_rope_layers``, despite its name, is 1 for the layers with RoPE."""
    rotated = read.config.get("no_rope_layers")
    if rotated is None:
        every = read.integer("no_rope_layer_interval", 4)
        return [(i + 1) % every != 0 for i in range(layers)]
    if (
        not isinstance(rotated, list)
        or len(rotated) != layers
        or not all(isinstance(value, int) for value in rotated)
    ):
        raise UnsupportedModelError(
            f"config.json: no_rope_layers must have a 0 or 1 for each of the "
            f"{layers} layers, got {brief(rotated)}"
        )
    return [bool(value) for value in rotated]
