"""Idefics 3 (Laurençon et al., 2024): its language model, a Llama, and its tower, a SigLIP."""

from qlora_wgpu.families import parts


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """The language model by the names that it has in files and in transformers alike."""
    decoder = parts.read_language_model(read, "llama").within("model.text_model.")
    return parts.with_images(read, decoder, 128_257)


def compose_vision(read: parts.ConfigReader) -> parts.VisionTower:
    """Pixel shuffle merges patches, and one layer projects them."""
    vision, _ = parts.vision_config(read, "idefics3_vision", "idefics3")
    return parts.read_shuffling_siglip(read, vision)
