"""Sizes of textures."""

import numpy as np
import pytest

from qlora_wgpu.gpu.limits import TEXTURE_PITCH, TEXTURE_ROW, texture_bytes


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 7, 8, 9, 255, 256, 257, 4096])
def test_no_height_is_a_power_of_two(rows):
    """Each kind of height would have shaders of its own on lavapipe, compiled for seconds."""
    for nbytes in {max(rows * TEXTURE_ROW - 15, 0), rows * TEXTURE_ROW}:
        height, rest = divmod(texture_bytes(nbytes), TEXTURE_PITCH)
        assert rest == 0 and rows <= height <= rows + 3
        assert height.bit_count() > 1


def test_the_largest_texture_stays_one():
    """Its height is a power of two, and one row more would be beyond the limit."""
    assert texture_bytes(16384 * TEXTURE_ROW) == 16384 * TEXTURE_PITCH
    assert texture_bytes(8192 * TEXTURE_ROW) == 8192 * TEXTURE_PITCH


@pytest.mark.parametrize("row_bytes", [512, 1024, 2048, 3072, 4096])
def test_rows_a_power_of_two_apart_are_spread_over_the_cache(row_bytes):
    """A product reads 128 rows of weights side by side, from a cache of 64 sets of 8 lines."""
    starts = np.arange(128) * row_bytes
    places = starts // TEXTURE_ROW * TEXTURE_PITCH + starts % TEXTURE_ROW
    lines_of_a_set = np.bincount(places // 64 % 64)
    assert lines_of_a_set.max() <= 4


def test_what_is_written_is_read(device):
    data = np.arange(TEXTURE_ROW // 4 + 5, dtype=np.uint32)
    texture = device.texture(data.nbytes, "test")
    assert texture.size[1] == 3
    device.write_texture(texture, data)
    got = np.frombuffer(device.read_texture(texture, 40, TEXTURE_ROW - 20), np.uint32)
    np.testing.assert_array_equal(got, data[TEXTURE_ROW // 4 - 5 :])
