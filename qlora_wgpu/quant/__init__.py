"""Quantization of frozen weights: NF4 with double quantization, in bitsandbytes' layout."""

from qlora_wgpu.quant.codebooks import NF4_QUANT_MAP, dynamic_quant_map
from qlora_wgpu.quant.double_quant import NESTED_BLOCKSIZE
from qlora_wgpu.quant.nf4 import BLOCKSIZES, NF4Tensor, quantize_nf4

__all__ = [
    "BLOCKSIZES",
    "NESTED_BLOCKSIZE",
    "NF4_QUANT_MAP",
    "NF4Tensor",
    "dynamic_quant_map",
    "quantize_nf4",
]
