"""How large memory on a device is, where a binding may begin in it, and how many there are."""

from __future__ import annotations

ALIGNMENT = 256  # of buffer windows: the most any GPU asks for
TEXTURE_WIDTH = 1024  # texels of a row that hold something; shaders/common/texel.wgsl has it too
TEXTURE_ROW = 16 * TEXTURE_WIDTH  # bytes of them
# One line of the cache more than those take: else rows of a matrix that are a power of two of bytes
# apart fall into a few sets of the cache, and products on software GPUs lose an eighth.
TEXTURE_PITCH = TEXTURE_ROW + 64
MOST_STORAGE_BUFFERS = 8  # of a dispatch: what WebGPU promises on any device
MOST_STORAGE_TEXTURES = 8  # of a dispatch, which is more than WebGPU promises
_FREE_ROWS = 8192  # the least height that any device allows


def buffer_bytes(nbytes: int) -> int:
    """Bytes that a buffer of this size takes on the device."""
    return max(nbytes + -nbytes % 4, 16)


def texture_bytes(nbytes: int) -> int:
    """Bytes that a texture of this size takes on the device: whole rows of texels.

    lavapipe compiles a shader anew for each of its textures whose height is a power of two or is
    not, as chance has it: none is, but for those near a device's limit.
    """
    rows = max(-(-nbytes // TEXTURE_ROW), 3)
    is_power = rows & (rows - 1) == 0
    return (rows + (is_power and rows < _FREE_ROWS)) * TEXTURE_PITCH
