"""The numbers that codes of 4 and 8 bits stand for, by the standards that define them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]


def _fixed(values: npt.ArrayLike) -> Float32Array:
    array = np.array(values, np.float32)
    array.flags.writeable = False
    return array


_BYTES = np.arange(256, dtype=np.uint8)

NIBBLES: Float32Array = _fixed(np.arange(16))
"""Unsigned integers of 4 bits."""
UNSIGNED: Float32Array = _fixed(np.arange(256))
"""Unsigned integers of 8 bits."""
SIGNED: Float32Array = _fixed(_BYTES.view(np.int8))
"""Integers of 8 bits in two's complement."""
E2M1: Float32Array = _fixed(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
)
"""Floats of 4 bits: MXFP4's and NVFP4's elements (OCP Microscaling Formats 1.0, section 5.3.3)."""
E4M3: Float32Array = _fixed(_BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32))
"""Floats of 8 bits that end at 448 and have no infinity (Micikevicius et al., arXiv:2209.05433)."""
E5M2: Float32Array = _fixed(_BYTES.view(ml_dtypes.float8_e5m2).astype(np.float32))
"""Floats of 8 bits with float16's exponents."""
E8M0: Float32Array = _fixed([*np.ldexp(1.0, np.arange(255) - 127), np.nan])
"""Powers of two of 8 bits, MXFP4's scales (OCP Microscaling Formats 1.0, section 5.4.1)."""
IQ4_VALUES: Float32Array = _fixed(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
)
"""What codes of ggml's IQ4_NL and IQ4_XS stand for."""
