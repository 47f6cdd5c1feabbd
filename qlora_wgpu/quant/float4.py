"""Weights as floats of 4 bits in safetensors folders: MXFP4 and NVFP4.

Files have the even weight of a byte in the low nibble.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from qlora_wgpu.quant.number_formats import E2M1, E8M0
from qlora_wgpu.quant.quantized_weight import QuantizedWeight
from qlora_wgpu.weight_format import WHOLE, WeightFormat

MXFP4 = WeightFormat("MXFP4", E2M1, 32, WHOLE)
"""w = value · 2^(e - 127), 32 weights of a row to an e (OCP Microscaling Formats 1.0)."""
NVFP4 = WeightFormat("NVFP4", E2M1, 16, WHOLE)
"""w = value · scale, 16 weights of a row to a scale, which is one of E4M3 and one of the tensor."""


def mxfp4(codes: npt.NDArray[np.uint8], exponents: npt.NDArray[np.uint8]) -> QuantizedWeight:
    """A matrix in MXFP4.

    Args:
        codes: (out_features, in_features / 2) bytes.
        exponents: (out_features, in_features / 32), none of them 255.
    """
    return QuantizedWeight(
        shape=(codes.shape[0], 2 * codes.shape[1]),
        codes=_even_first(codes),
        quant_map=MXFP4.quant_map,
        blocksize=MXFP4.blocksize,
        absmax=exponents.reshape(-1),
        nested_absmax=np.ones(1, np.float32),
        nested_quant_map=E8M0,
        nested_blocksize=WHOLE,
        dtype="bfloat16",
        name=MXFP4.name,
    )


def nvfp4(
    codes: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.uint8],
    scale_map: npt.NDArray[np.float32],
) -> QuantizedWeight:
    """A matrix in NVFP4.

    Args:
        codes: (out_features, in_features / 2) bytes.
        scales: (out_features, in_features / 16) codes.
        scale_map: (256,), what those stand for, the tensor's scale in them.
    """
    return QuantizedWeight(
        shape=(codes.shape[0], 2 * codes.shape[1]),
        codes=_even_first(codes),
        quant_map=NVFP4.quant_map,
        blocksize=NVFP4.blocksize,
        absmax=scales.reshape(-1),
        nested_absmax=np.ones(1, np.float32),
        nested_quant_map=scale_map,
        nested_blocksize=WHOLE,
        dtype="bfloat16",
        name=NVFP4.name,
    )


def _even_first(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Bytes with their nibbles swapped."""
    flat = codes.reshape(-1)
    return flat << np.uint8(4) | flat >> np.uint8(4)
