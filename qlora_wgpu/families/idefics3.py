"""Idefics 3 (Laurençon et al., 2024): its language model, a Llama."""

from qlora_wgpu.families import parts


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """The language model by the names that it has in files and in transformers alike."""
    return parts.read_language_model(read, "llama").within("model.text_model.")
