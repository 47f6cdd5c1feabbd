"""ggml's types, kept bit for bit: gguf's own dequantization is the reference."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import quants

from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.quant import GGML_FORMATS, ggml, repack_ggml

# Where a block's float16 numbers have the byte with their exponent's upper bits.
EXPONENTS = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (1,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (1, 3)),
    "Q2_K": (81, 83),
    "Q3_K": (109,),
    "Q6_K": (209,),
    "MXFP4": (),
    "NVFP4": (),
}


def raw_blocks(name: str, count: int) -> np.ndarray:
    """Random bytes whose numbers are finite."""
    form = GGML_FORMATS[name]
    blocks = np.random.default_rng(0).integers(0, 256, (count, form.block_bytes), dtype=np.uint8)
    for place in EXPONENTS[name]:
        blocks[:, place] &= 0xBF
    if name == "MXFP4":
        blocks[blocks[:, 0] == 255, 0] = 0
    return blocks


@pytest.mark.parametrize("name", GGML_FORMATS)
def test_every_bit_is_that_of_gguf(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    kind, form = gguf.GGMLQuantizationType[name], GGML_FORMATS[name]
    assert gguf.GGML_QUANT_SIZES[kind] == (form.block, form.block_bytes)
    monkeypatch.setattr(ggml, "_WEIGHTS", 5 * form.block)  # taken apart in several turns
    shape = 7, 3 * form.block
    blocks = raw_blocks(name, 21)
    expected = quants.dequantize(blocks.reshape(7, -1), kind).astype(np.float32)
    weight = repack_ggml(name, blocks.reshape(-1), shape, "x")
    assert weight.format.key == form.form.key and weight.format.name == name
    assert weight.dequantize().tobytes() == expected.tobytes()
    stored, held = blocks.nbytes, weight.codes.nbytes + weight.absmax.nbytes
    assert held <= (2 if form.form.bits == 4 else 1.8) * stored


def test_what_does_not_fit_is_refused() -> None:
    raw = raw_blocks("Q4_K", 2).reshape(-1)
    with pytest.raises(CheckpointError, match="x has rows of 128 weights, expected a multiple"):
        repack_ggml("Q4_K", raw, (4, 128), "x")
    with pytest.raises(CheckpointError, match="x has 288 bytes, expected 432 for 3 x 256 weights"):
        repack_ggml("Q4_K", raw, (3, 256), "x")
    infinite = raw.copy()
    infinite[:2] = 0x00, 0x7C
    with pytest.raises(CheckpointError, match="x contains a scale that is NaN or infinite"):
        repack_ggml("Q4_K", infinite, (2, 256), "x")
    blocks = raw_blocks("MXFP4", 2)
    blocks[1, 0] = 255
    with pytest.raises(CheckpointError, match="x contains a scale that is NaN or infinite"):
        repack_ggml("MXFP4", blocks.reshape(-1), (2, 32), "x")
