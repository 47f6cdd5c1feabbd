"""Quantization of frozen weights: NF4 as in bitsandbytes, and the formats of other files."""

from qlora_wgpu.quant.ggml import GGML_FORMATS, GgmlFormat, repack_ggml
from qlora_wgpu.quant.nf4 import BLOCKSIZES, nf4_format, quantize_nf4
from qlora_wgpu.quant.quantized_weight import (
    NESTED_BLOCKSIZE,
    NF4_QUANT_MAP,
    QuantizedWeight,
    dynamic_quant_map,
)
from qlora_wgpu.weight_format import WHOLE, WeightFormat

__all__ = [
    "BLOCKSIZES",
    "GGML_FORMATS",
    "NESTED_BLOCKSIZE",
    "NF4_QUANT_MAP",
    "WHOLE",
    "GgmlFormat",
    "QuantizedWeight",
    "WeightFormat",
    "dynamic_quant_map",
    "nf4_format",
    "quantize_nf4",
    "repack_ggml",
]
