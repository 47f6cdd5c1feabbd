"""LFM2-VL (Liquid AI, 2025): its language model, an LFM2."""

from dataclasses import replace

from qlora_wgpu.families import parts


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Embedding and head are one unless the whole model's config says otherwise."""
    tied = read.flag("tie_embedding", read.flag("tie_word_embeddings", True))
    decoder = parts.read_language_model(read, "lfm2")
    return replace(decoder, tied=tied).within(parts.LANGUAGE_MODEL)
