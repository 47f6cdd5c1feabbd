"""Sizes of textures."""

import numpy as np
import pytest

from qlora_wgpu.gpu.sizes import TEXTURE_WIDTH, texture_bytes

ROW = 16 * TEXTURE_WIDTH


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 7, 8, 9, 255, 256, 257, 4096])
def test_no_height_is_a_power_of_two(rows):
    """Each kind of height would have shaders of its own on lavapipe, compiled for seconds."""
    for nbytes in {max(rows * ROW - 15, 0), rows * ROW}:
        height, rest = divmod(texture_bytes(nbytes), ROW)
        assert rest == 0 and rows <= height <= rows + 3
        assert height.bit_count() > 1


def test_the_largest_texture_stays_one():
    """Its height is a power of two, and one row more would be beyond the limit."""
    assert texture_bytes(16384 * ROW) == 16384 * ROW
    assert texture_bytes(8192 * ROW) == 8192 * ROW


def test_what_is_written_is_read(device):
    data = np.arange(ROW // 4 + 5, dtype=np.uint32)
    texture = device.texture(data.nbytes, "test")
    assert texture.size[1] == 3
    device.write_texture(texture, data)
    got = np.frombuffer(device.read_texture(texture, 40, ROW - 20), np.uint32)
    np.testing.assert_array_equal(got, data[ROW // 4 - 5 :])
