"""LFM2-VL (Liquid AI, 2025): its language model, an LFM2, and a SigLIP 2."""

from dataclasses import replace

from qlora_wgpu.families import parts


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Embedding and head are one unless the whole model's config says otherwise."""
    tied = read.flag("tie_embedding", read.flag("tie_word_embeddings", True))
    decoder = parts.read_language_model(read, "lfm2")
    decoder = replace(decoder, tied=tied).within(parts.LANGUAGE_MODEL)
    return parts.with_images(read, decoder, 396)


def compose_vision(read: parts.ConfigReader) -> parts.VisionTower:
    """Merged patches of images of any aspect ratio through an MLP, normalized first or not."""
    vision, _ = parts.vision_config(read, parts.SIGLIP2)
    merge, at = read.integer("downsample_factor", 2), "model.multi_modal_projector."
    columns = merge**2 * vision.integer("hidden_size", 768)
    inner, bias = read.integer("projector_hidden_size", 2560), read.flag("projector_bias", True)
    normalizes = read.flag("projector_use_layernorm", True)
    norm = (f"{at}layer_norm", parts.LayerNorm(1e-5, bias=True), columns) if normalizes else None
    layers = (
        parts.layer_of(f"{at}linear_1", inner, columns, bias=bias),
        parts.layer_of(f"{at}linear_2", parts.text_size(read), inner, bias=bias),
    )
    activation = parts.read_activation(read, "gelu", "projector_hidden_act")
    connector = parts.Projector(layers, activation, merge, after=norm)
    return parts.read_siglip2(
        vision, "model.vision_tower.", connector, merge=merge, stored_prefixes=parts.TOWER_PREFIXES
    )
