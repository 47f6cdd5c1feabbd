"""Qwen3-VL (Qwen team, 2025): its language model, a Qwen 3, and its tower."""

from dataclasses import replace

from qlora_wgpu.errors import UnsupportedModelError, brief
from qlora_wgpu.families import parts, qwen3


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """The whole model's config ties embedding and head."""
    text = parts.text_config(read)
    plain = {**parts.without_sections(text.config), "use_sliding_window": False}
    part = parts.ConfigReader(plain).with_defaults(num_key_value_heads=32, rope_theta=500_000.0)
    decoder = replace(qwen3.compose(part), tied=read.flag("tie_word_embeddings", False))
    return reading_images(read, text, decoder.within(parts.LANGUAGE_MODEL))


def reading_images(
    read: parts.ConfigReader, text: parts.ConfigReader, decoder: parts.Decoder
) -> parts.Decoder:
    """Interleaved M-RoPE; features of some of the tower's layers are added after the first ones."""
    pairs = decoder.dimensions.head_dim // 2
    axes = parts.mrope_axes(text.config, (24, 20, 20), pairs, interleaved=True)
    tower = read.config.get("vision_config") or {}
    taken = tower.get("deepstack_visual_indexes", (8, 16, 24))
    if not isinstance(taken, list | tuple):
        raise UnsupportedModelError(
            f"config.json: deepstack_visual_indexes must be a list of layers, got {brief(taken)}"
        )
    return parts.with_images(read, decoder, 151_655, axes=axes, deepstack=len(taken))


def compose_vision(read: parts.ConfigReader) -> parts.VisionTower:
    """DeepStack reads some layers' states."""
    kinds = ("qwen3_vl_vision", "qwen3_vl", "qwen3_vl_moe", "qwen3_vl_moe_vision")
    vision, _ = parts.vision_config(read, *kinds)
    depth, stack = vision.integer("depth", 27), vision.config.get("deepstack_visual_indexes")
    stack = [8, 16, 24] if stack is None else stack
    if (
        not isinstance(stack, list)
        or any(type(i) is not int or not 0 <= i < depth for i in stack)
        or stack != sorted(set(stack))
    ):
        raise UnsupportedModelError(
            "config.json: deepstack_visual_indexes must be a list of ascending integers from 0 to "
            f"{depth - 1}, got {brief(stack)}"
        )
    return vision_tower(vision, tuple(stack))


def vision_tower(vision: parts.ConfigReader, stack: tuple[int, ...] = ()) -> parts.VisionTower:
    """Learned positions, resized, next to rotary ones; ``stack`` are DeepStack's layers."""
    size, depth = vision.integer("hidden_size", 1152), vision.integer("depth", 27)
    heads, inner = vision.integer("num_heads", 16), vision.integer("intermediate_size", 4304)
    activation = parts.read_activation(vision, "gelu_pytorch_tanh")
    of = parts.tower_sizes(size, inner, depth, heads)
    mlp = parts.PlainMLP(of, activation, True, ("linear_fc1", "linear_fc2"))
    out_features = vision.integer("out_hidden_size", 3584)
    merger = ("norm", "linear_fc1", "linear_fc2")
    norm = parts.LayerNorm(1e-6, bias=True)
    names = parts.QwenNames(norm, mlp, size, out_features, merger)
    side = int(vision.integer("num_position_embeddings", 2304) ** 0.5)
    positions = parts.BilinearPositions("model.visual.pos_embed.weight", side, size)
    patched = vision.with_defaults(patch_size=16, depth=27)
    return parts.read_qwen_tower(
        patched, names, selected=stack, positions=positions, patch_bias=True
    )
