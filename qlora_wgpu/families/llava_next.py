"""LLaVA-NeXT, or LLaVA 1.6 (Liu et al., 2024): its language model."""

from qlora_wgpu.families import parts


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """As LLaVA, but the whole model's config alone ties embedding and head."""
    decoder = parts.read_language_model(read, "llama")
    return decoder.within(parts.LANGUAGE_MODEL, "language_model.")
