"""The element types of GGUF: how many bytes a block of each takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ElementType:
    """An element type.

    Attributes:
        number: What the file calls it.
        name: What llama.cpp calls it, for example "Q4_K".
        block: Neighbours in a row that are stored together.
        nbytes: Bytes of such a block.
        is_float: Whether elements are floating-point numbers as they are.
    """

    number: int
    name: str
    block: int
    nbytes: int
    is_float: bool = False

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row."""
        return columns // self.block * self.nbytes


FLOATS = {
    0: ElementType(0, "F32", 1, 4, True),
    1: ElementType(1, "F16", 1, 2, True),
    28: ElementType(28, "F64", 1, 8, True),
    30: ElementType(30, "BF16", 1, 2, True),
}
"""Types that weights are read from as they are."""

_QUANTIZED = (
    *((2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22), (7, "Q5_1", 32, 24)),
    *((8, "Q8_0", 32, 34), (10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110), (12, "Q4_K", 256, 144)),
    *((13, "Q5_K", 256, 176), (14, "Q6_K", 256, 210), (16, "IQ2_XXS", 256, 66)),
    *((17, "IQ2_XS", 256, 74), (18, "IQ3_XXS", 256, 98), (19, "IQ1_S", 256, 50)),
    *((20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82)),
    *((23, "IQ4_XS", 256, 136), (29, "IQ1_M", 256, 56), (34, "TQ1_0", 256, 54)),
    *((35, "TQ2_0", 256, 66), (39, "MXFP4", 32, 17)),
)
_OTHERS = (
    *((9, "Q8_1", 32, 40), (15, "Q8_K", 256, 292), (24, "I8", 1, 1), (25, "I16", 1, 2)),
    *((26, "I32", 1, 4), (27, "I64", 1, 8), (40, "NVFP4", 64, 36), (41, "Q1_0", 128, 18)),
)

QUANTIZED = {entry[0]: ElementType(*entry) for entry in _QUANTIZED}
"""Types whose blocks become floating-point numbers."""

TYPES = FLOATS | QUANTIZED | {entry[0]: ElementType(*entry) for entry in _OTHERS}
"""All that are known, by number; those beside the others are in no weights that are read."""
