"""SmolVLM and SmolVLM 2 (Marafioti et al., 2025): as Idefics 3, with SmolLM 2 as language model."""

from qlora_wgpu.families import parts
from qlora_wgpu.families.idefics3 import compose

__all__ = ["compose", "compose_vision"]


def compose_vision(read: parts.ConfigReader) -> parts.VisionTower:
    """As Idefics 3's, by another name."""
    vision, _ = parts.vision_config(read, "smolvlm_vision", "idefics3_vision", "idefics3")
    return parts.read_shuffling_siglip(read, vision)
