"""LLaVA 1.5 (Liu et al., 2023): its language model, a Vicuna, Mistral or Qwen 2."""

from qlora_wgpu.families import parts


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Either config may tie embedding and head."""
    decoder = parts.read_language_model(read, "llama", text_ties=True)
    return decoder.within(parts.LANGUAGE_MODEL, "language_model.")
