"""LLaVA-NeXT, or LLaVA 1.6 (Liu et al., 2024): its language model, and a CLIP or SigLIP."""

from dataclasses import replace

from qlora_wgpu.families import parts


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """As LLaVA, but the whole model's config alone ties embedding and head."""
    decoder = parts.read_language_model(read, "llama")
    decoder = decoder.within(parts.LANGUAGE_MODEL, "language_model.")
    return parts.with_images(read, decoder, 32_000)


def compose_vision(read: parts.ConfigReader) -> parts.VisionTower:
    """As LLaVA's; an image's tiles are put together, and each of their rows ends with a newline."""
    tower = parts.read_llava_tower(read)
    expected = "default" if tower.class_token else "full"
    read.choice("vision_feature_select_strategy", (expected,), "default")
    return replace(tower, newline="model.image_newline")
