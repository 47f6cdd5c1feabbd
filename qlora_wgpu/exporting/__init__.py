"""Exports for other programs: merged models, 4-bit folders, GGUF files."""

from qlora_wgpu.exporting.folders import quantize_folder
from qlora_wgpu.exporting.gguf import export_gguf
from qlora_wgpu.exporting.merge import merge

__all__ = ["export_gguf", "merge", "quantize_folder"]
