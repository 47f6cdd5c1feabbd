"""NF4 on a real model, against the file bitsandbytes made of it."""

from __future__ import annotations

import numpy as np
from support.recorded import RECORDED, needs_recordings

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.quant import quantize_nf4

PLAIN = RECORDED / "models" / "TinyStories-656K"
QUANTIZED = RECORDED / "models" / "TinyStories-656K-bnb-nf4-dq"

pytestmark = needs_recordings


def test_every_byte_is_that_of_bitsandbytes() -> None:
    plain, quantized = ModelFolder.open(PLAIN), ModelFolder.open(QUANTIZED)
    compared = 0
    for name in quantized.names():
        if not name.endswith("_proj.weight"):
            continue
        expected = quantized[name].quantized()
        assert expected is not None
        actual = quantize_nf4(plain[name].read())
        for field in ("codes", "absmax", "nested_absmax", "nested_quant_map"):
            one, other = getattr(actual, field), getattr(expected, field)
            assert one.dtype == other.dtype, (name, field)
            assert one.tobytes() == other.tobytes(), (name, field)
        assert actual.format.key == expected.format.key
        assert actual.nested_offset == expected.nested_offset, name
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
        compared += 1
    assert compared == 14


def test_what_is_not_quantized_is_the_same() -> None:
    plain, quantized = ModelFolder.open(PLAIN), ModelFolder.open(QUANTIZED)
    norms = [name for name in plain.names() if "norm" in name]
    assert len(norms) == 5
    for name in norms:
        assert quantized[name].quantized() is None
        assert np.array_equal(quantized[name].read(), plain[name].read())
