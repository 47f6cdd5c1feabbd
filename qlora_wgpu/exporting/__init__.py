"""Results for other programs: merged models, 4-bit folders, GGUF adapters."""

from qlora_wgpu.exporting.gguf import export_gguf
from qlora_wgpu.exporting.merge import merge
from qlora_wgpu.exporting.quantized import quantize_folder

__all__ = ["export_gguf", "merge", "quantize_folder"]
