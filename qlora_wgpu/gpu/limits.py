"""Limits of WebGPU: sizes of buffers and textures, alignment, and what every GPU must grant."""

from __future__ import annotations

from collections.abc import Mapping

from qlora_wgpu.errors import DeviceError
from qlora_wgpu.gpu.matrix import PROMISED
from qlora_wgpu.gpu.wgsl import MAX_WORKGROUPS

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


def memory_bytes(nbytes: int, *, texture: bool) -> int:
    """Bytes that a buffer or a texture of this size takes on the device."""
    return texture_bytes(nbytes) if texture else buffer_bytes(nbytes)


_INVOCATIONS = "max-compute-invocations-per-workgroup"
_ALONG_X = "max-compute-workgroup-size-x"
_LEAST = {
    "max-storage-buffers-per-shader-stage": (MOST_STORAGE_BUFFERS, "storage buffers of a shader"),
    _INVOCATIONS: (PROMISED.invocations, "invocations of a workgroup"),
    _ALONG_X: (PROMISED.invocations, "invocations along a workgroup's first dimension"),
    "max-compute-workgroup-storage-size": (
        PROMISED.workgroup_bytes, "bytes of a workgroup's memory",
    ),
    "max-compute-workgroups-per-dimension": (MAX_WORKGROUPS, "workgroups along a dimension"),
}  # fmt: skip
_MOST = ("min-storage-buffer-offset-alignment", "min-uniform-buffer-offset-alignment")


def require_limits(name: str, limits: Mapping[str, int]) -> None:
    """Refuses a GPU that allows less than WebGPU promises of what kernels need."""
    for limit, (least, what) in _LEAST.items():
        if limits[limit] < least:
            raise DeviceError(
                f"{name} allows {limits[limit]:,} {what} ({limit}), and training takes "
                f"{least:,}: update its driver, or choose another GPU (device.gpu)"
            )
    for limit in _MOST:
        if limits[limit] > ALIGNMENT:
            raise DeviceError(
                f"{name} wants buffers to begin at multiples of {limits[limit]:,} bytes ({limit}), "
                f"and they begin at those of {ALIGNMENT}: update its driver, or choose another GPU "
                "(device.gpu)"
            )


def most_invocations(limits: Mapping[str, int]) -> int:
    """Invocations that a workgroup may have, all of them along its first dimension."""
    return min(limits[_INVOCATIONS], limits[_ALONG_X])


def most_bytes(limits: Mapping[str, int], *, in_textures: bool) -> int:
    """The largest binding, in bytes."""
    most = min(limits["max-storage-buffer-binding-size"], limits["max-buffer-size"])
    if in_textures:
        most = min(most, TEXTURE_ROW * limits["max-texture-dimension-2d"])
    return int(most)


def beyond_textures(name: str, limits: Mapping[str, int]) -> str:
    """Why kernels for software GPUs cannot read from textures; empty if they can."""
    limit = "max-storage-textures-per-shader-stage"
    if limits[limit] >= MOST_STORAGE_TEXTURES:
        return ""
    return (
        f"{name} allows {limits[limit]:,} storage textures of a shader ({limit}), and kernels bind "
        f"{MOST_STORAGE_TEXTURES}: operands lie in buffers instead, which is slower"
    )
