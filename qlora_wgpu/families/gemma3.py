"""Gemma 3 with images: its text part, and its tower, a SigLIP."""

from qlora_wgpu.errors import UnsupportedModelError
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


def compose_vision(read: parts.ConfigReader) -> parts.VisionTower:
    """Patches are averaged, normalized and projected by a matrix that is stored transposed."""
    vision, _ = parts.vision_config(read, parts.SIGLIP)
    size, out = vision.integer("hidden_size", 768), parts.text_size(read, 2304)
    side = vision.integer("image_size", 224) // vision.integer("patch_size", 16)
    tokens = int(read.integer("mm_tokens_per_image", 256) ** 0.5)
    if side % tokens:
        raise UnsupportedModelError(
            f"config.json: mm_tokens_per_image must be the square of a divisor of the {side} "
            f"patches of an image's side, got {tokens**2}"
        )
    at = "model.multi_modal_projector."
    name = f"{at}mm_input_projection_weight"
    layer = parts.TowerMatrix(name, out, size, name, (size, out), make=parts.transposed)
    norm = parts.RMSNorm(vision.number("layer_norm_eps", 1e-6), offset=1.0)
    connector = parts.PooledProjector(layer, norm, f"{at}mm_soft_emb_norm", side // tokens)
    return parts.read_siglip(
        vision, "model.vision_tower.", connector, merge=side // tokens,
        stored_prefixes=parts.TOWER_PREFIXES,
    )  # fmt: skip
