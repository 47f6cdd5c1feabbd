"""Exports for other programs: merged models, 4-bit folders, GGUF files."""

from qlora_wgpu.export.folders import quantize_folder
from qlora_wgpu.export.gguf import export_gguf
from qlora_wgpu.export.merge import merge

__all__ = ["export_gguf", "merge", "quantize_folder"]
