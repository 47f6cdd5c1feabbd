"""bfloat16 rounds as IEEE 754 says, and NaN never becomes a number."""

import numpy as np
import pytest

from qlora_wgpu.bfloat16 import from_bfloat16, to_bfloat16


def floats(*bits: int) -> np.ndarray:
    return np.array(bits, np.uint32).view(np.float32)


def nearest_even(array: np.ndarray) -> np.ndarray:
    """The rule in integers: add a half less one, and one more where the kept part is odd."""
    bits = array.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001, 0x7FC17FC1])
def test_nan_stays_nan(bits):
    rounded = to_bfloat16(floats(bits))
    assert np.isnan(from_bfloat16(rounded)).all(), hex(int(rounded[0]))


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (0x7F800000, 0x7F80),  # infinity
        (0xFF800000, 0xFF80),
        (0x7F7FFFFF, 0x7F80),  # the largest float32 is nearer to infinity
        (0x3F808000, 0x3F80),  # ties go to the even neighbour
        (0x3F818000, 0x3F82),
        (0x3F808001, 0x3F81),
        (0x00008000, 0x0000),  # subnormals are numbers like others
        (0x00008001, 0x0001),
        (0x007FFFFF, 0x0080),
        (0x80000001, 0x8000),  # zero keeps its sign
    ],
)
def test_rounding(bits, expected):
    assert to_bfloat16(floats(bits))[0] == expected


@pytest.mark.parametrize("mask", [0xFFFFFFFF, 0x807FFFFF])  # anything; zeros and subnormals
def test_random_bits_round_to_nearest_even(mask):
    bits = np.random.default_rng(0).integers(0, 2**32, 10**6, np.uint32) & np.uint32(mask)
    x = bits.view(np.float32)
    x = x[~np.isnan(x)]
    assert np.array_equal(to_bfloat16(x), nearest_even(x))


def test_widening_is_exact():
    bits = np.arange(2**16, dtype=np.uint16)
    assert np.array_equal(from_bfloat16(bits).view(np.uint32), bits.astype(np.uint32) << 16)
    number = ~np.isnan(from_bfloat16(bits))
    assert np.array_equal(to_bfloat16(from_bfloat16(bits[number])), bits[number])


def test_any_layout():
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert np.array_equal(from_bfloat16(to_bfloat16(x.T)), x.T)
    assert from_bfloat16(to_bfloat16(x)[:, ::2]).shape == (3, 2)
    assert to_bfloat16(np.zeros((0, 8), np.float32)).shape == (0, 8)


def test_a_number_by_itself_stays_one():
    """Models hold such scalars: Apertus's β and ε."""
    bits = to_bfloat16(np.array(0.5, np.float32))
    assert bits.shape == () and from_bfloat16(bits).shape == ()
    assert from_bfloat16(bits) == 0.5
