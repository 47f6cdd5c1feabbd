"""Mistral Small 3 and Ministral 3 (Mistral AI, 2025): their text part, and a Pixtral."""

from functools import partial

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
    decoder = _TEXTS[kind](text).within(parts.LANGUAGE_MODEL, "language_model.")
    return parts.with_images(read, decoder, 10)


def compose_vision(read: parts.ConfigReader) -> parts.VisionTower:
    """Patches are normalized, merged and projected by an MLP."""
    vision, _ = parts.vision_config(read, parts.PIXTRAL)
    merge, at = read.integer("spatial_merge_size", 2), "model.multi_modal_projector."
    layers = vision.integer("num_hidden_layers", 24)
    selected = parts.selected_layers(read, layers, -1)
    if len(selected) > 1:
        raise UnsupportedModelError(
            "config.json: vision_feature_layer must be an integer for 'mistral3', got a list"
        )
    text = read.config.get("text_config")
    eps = parts.ConfigReader(text if isinstance(text, dict) else {}).number("rms_norm_eps", 1e-6)
    size, out = vision.integer("hidden_size", 1024), parts.text_size(read, 4096)
    bias = read.flag("multimodal_projector_bias", False)
    merger = parts.TowerMatrix(
        f"{at}patch_merger.merging_layer", size, merge**2 * size,
        f"{at}patch_merger.merging_layer.weight", (size, merge**2 * size),
        make=partial(parts.channels_inside, merge**2),
    )  # fmt: skip
    projector = parts.Projector(
        (
            merger,
            parts.layer_of(f"{at}linear_1", out, size, bias=bias),
            parts.layer_of(f"{at}linear_2", out, out, bias=bias),
        ),
        parts.read_activation(read, "gelu", "projector_hidden_act"),
        merge,
        before=(f"{at}norm", parts.RMSNorm(eps), size),
    )
    return parts.read_pixtral(
        vision, "model.vision_tower.", projector, merge=merge, selected=selected,
        stored_prefixes=parts.TOWER_PREFIXES,
    )  # fmt: skip
