"""LLaVA 1.5 (Liu et al., 2023): a Vicuna, Mistral or Qwen 2, and a CLIP or SigLIP."""

from qlora_wgpu.families import parts


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Either config may tie embedding and head."""
    decoder = parts.read_language_model(read, "llama", text_ties=True)
    decoder = decoder.within(parts.LANGUAGE_MODEL, "language_model.")
    return parts.with_images(read, decoder, 32_000)


def compose_vision(read: parts.ConfigReader) -> parts.VisionTower:
    """The hidden states of one layer, or several side by side, through an MLP."""
    return parts.read_llava_tower(read)
