"""Qwen2.5-VL (Bai et al., 2025): its language model, as Qwen2-VL's, and its tower."""

from qlora_wgpu.errors import UnsupportedModelError, brief
from qlora_wgpu.families import parts
from qlora_wgpu.families.qwen2_vl import compose

__all__ = ["compose", "compose_vision"]


def compose_vision(read: parts.ConfigReader) -> parts.VisionTower:
    """RMSNorms and gated MLPs; most layers attend within windows."""
    vision, _ = parts.vision_config(read, "qwen2_5_vl_vision", "qwen2_5_vl")
    size, depth = vision.integer("hidden_size", 3584), vision.integer("depth", 32)
    of = parts.tower_sizes(
        size, vision.integer("intermediate_size", 3420), depth, vision.integer("num_heads", 16)
    )
    mlp = parts.GatedMLP(of, parts.read_activation(vision, "silu"), bias=True)
    out_features = vision.integer("out_hidden_size", 3584)
    names = parts.QwenNames(parts.RMSNorm(1e-6), mlp, size, out_features)
    whole = vision.config.get("fullatt_block_indexes", [7, 15, 23, 31])
    if not isinstance(whole, list) or any(type(i) is not int for i in whole):
        raise UnsupportedModelError(
            f"config.json: fullatt_block_indexes must be a list of integers, got {brief(whole)}"
        )
    patch = vision.integer("patch_size", 14)
    window = vision.integer("window_size", 112) // vision.integer("spatial_merge_size", 2) // patch
    if not window:
        raise UnsupportedModelError(
            f"config.json: window_size must be at least a merged patch, got {window}"
        )
    return parts.read_qwen_tower(vision, names, window=window, whole=frozenset(whole))
