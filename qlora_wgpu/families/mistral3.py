"""Mistral Small 3 and Ministral 3 with images (Mistral AI, 2025): their text part."""

from qlora_wgpu.errors import UnsupportedModelError, brief
from qlora_wgpu.families import ministral3, mistral, parts

_TEXTS = {"mistral": mistral.compose, "ministral3": ministral3.compose}


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Tied by Hugging Face's defaults, but the files have a separate head."""
    text = parts.text_config(read, "'mistral' or 'ministral3'", ties=False)
    kind = text.config.get("model_type", "mistral")
    if not isinstance(kind, str) or kind not in _TEXTS:
        raise UnsupportedModelError(
            f"config.json: text_config's model_type {brief(kind)} is not supported in 'mistral3' "
            f"(supported: {', '.join(_TEXTS)})"
        )
    text = parts.ConfigReader(parts.language_config(text.config, kind))
    return _TEXTS[kind](text).within(parts.LANGUAGE_MODEL, "language_model.")
