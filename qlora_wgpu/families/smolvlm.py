"""SmolVLM and SmolVLM 2 (Marafioti et al., 2025): as Idefics 3, with SmolLM 2 as language model."""

from qlora_wgpu.families.idefics3 import compose

__all__ = ["compose"]
