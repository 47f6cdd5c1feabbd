"""Qwen2.5-VL (Bai et al., 2025): its language model, as Qwen2-VL's."""

from qlora_wgpu.families.qwen2_vl import compose

__all__ = ["compose"]
