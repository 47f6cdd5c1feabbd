"""The language model of a vision-language model, read from its config.json.

Image towers are not a part of it: it reads their features in place of placeholders' embeddings. An
adapter has the names that the whole model has in transformers, so that PEFT opens it there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qlora_wgpu.errors import UnsupportedModelError, brief
from qlora_wgpu.families.family import built_in_family
from qlora_wgpu.families.parts.config import ConfigReader
from qlora_wgpu.families.parts.decoder import Decoder, DecoderFamily
from qlora_wgpu.ops.batch import ImageLayout

LANGUAGE_MODEL = "model.language_model."
"""The prefix of its modules in most models of transformers 5."""

# transformers' defaults, which older files leave out.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008,
        "num_hidden_layers": 32, "num_attention_heads": 32,
    },
    "mistral": {
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    },
}  # fmt: skip
# Keys that transformers reads of such a model alone, not of one within another.
_ALONE = {"mistral": ("layer_types",)}


def language_config(text: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """A ``text_config`` of a kind with transformers' defaults, without what is not read of it."""
    kept = {key: value for key, value in text.items() if key not in _ALONE.get(kind, ())}
    return {**_DEFAULTS.get(kind, {}), **kept}


def with_images(read: ConfigReader, decoder: Decoder, default: int, **layout: Any) -> Decoder:
    """A decoder that reads images.

    Args:
        read: The config.json of the whole model, which names the placeholder.
        decoder: The language model.
        default: The placeholder's id if config.json does not name it.
        **layout: Further fields of ``ImageLayout``.
    """
    read = read.renamed("image_token_id", "image_token_index")
    images = ImageLayout(read.count("image_token_id", default), **layout)
    return replace(decoder, images=images)


def read_language_model(read: ConfigReader, default: str, *, text_ties: bool = False) -> Decoder:
    """Reads ``text_config`` by the family that its ``model_type`` names.

    Args:
        read: The config.json of the whole model.
        default: The ``model_type`` of a ``text_config`` that names none.
        text_ties: Whether ``text_config`` may tie embedding and head, too.

    Raises:
        UnsupportedModelError: If there is no ``text_config``, or no such family.
    """
    text = read.config.get("text_config")
    whole = read.config.get("model_type")
    if not isinstance(text, Mapping):
        raise UnsupportedModelError(f"config.json: model_type '{whole}' needs a text_config")
    kind = text.get("model_type", default)
    family = built_in_family(kind) if isinstance(kind, str) and kind != whole else None
    if not isinstance(family, DecoderFamily):
        raise UnsupportedModelError(
            f"config.json: text_config has model_type {brief(kind)}, which is not supported within "
            f"'{whole}'"
        )
    decoder = family.compose(ConfigReader(language_config(text, kind)))
    tied = read.flag("tie_word_embeddings", False)
    return replace(decoder, tied=tied or (text_ties and decoder.tied))
