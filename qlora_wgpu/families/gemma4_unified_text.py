"""Gemma 4 12B, text (Google, 2026): as the dense Gemma 4, without per-layer inputs."""

from qlora_wgpu.families import gemma4_text, parts

_LACKS = {"hidden_size_per_layer_input": None, "enable_moe_block": False}


def compose(read: parts.ConfigReader) -> parts.SharingDecoder:
    """Keys of features that it lacks are ignored, as in transformers."""
    config = read.with_defaults(sliding_window=1024).config
    return gemma4_text.compose(parts.ConfigReader({**config, **_LACKS}))
