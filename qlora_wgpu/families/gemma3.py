"""Gemma 3 with images: its text part."""

from qlora_wgpu.families import gemma3_text, parts


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Uses Hugging Face's defaults, which checkpoints with images do not repeat.

    The tokens of an image attend to each other.
    """
    part = parts.text_config(read).with_defaults(
        num_attention_heads=8, num_key_value_heads=4, head_dim=256, vocab_size=262_208
    )
    decoder = gemma3_text.compose(part).within(parts.LANGUAGE_MODEL, "language_model.")
    return parts.with_images(read, decoder, 262_144, bidirectional=True)
