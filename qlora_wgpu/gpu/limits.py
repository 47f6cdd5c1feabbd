"""Limits of WebGPU: sizes of buffers and textures, alignment, and minimum limits of GPUs."""

from __future__ import annotations

from collections.abc import Mapping

from qlora_wgpu.errors import DeviceError
from qlora_wgpu.gpu.matrix import PROMISED
from qlora_wgpu.gpu.wgsl import MAX_WORKGROUPS

ALIGNMENT = 256  # of buffer windows: the maximum of any GPU
TEXTURE_WIDTH = 1024  # used texels of a row; also in shaders/common/texel.wgsl
TEXTURE_ROW = 16 * TEXTURE_WIDTH  # bytes of them
# One cache line more than these take: otherwise rows of a matrix that are a power of two of bytes
# apart share a few sets of the cache, and products on software GPUs are an eighth slower.
TEXTURE_PITCH = TEXTURE_ROW + 64
MOST_STORAGE_BUFFERS = 8  # per dispatch, which WebGPU guarantees on any device
MOST_STORAGE_TEXTURES = 8  # per dispatch, which is more than WebGPU guarantees
_FREE_ROWS = 8192  # the maximum height that every device supports


def buffer_bytes(nbytes: int) -> int:
    return max(nbytes + -nbytes % 4, 16)


def texture_bytes(nbytes: int) -> int:
    """Bytes that a texture of this size takes on the device: whole rows of texels.

    lavapipe compiles a shader again depending on whether each texture's height is a power of two:
    none is, except near a device's limit.
    """
    rows = max(-(-nbytes // TEXTURE_ROW), 3)
    is_power = rows & (rows - 1) == 0
    return (rows + (is_power and rows < _FREE_ROWS)) * TEXTURE_PITCH


def memory_bytes(nbytes: int, *, texture: bool) -> int:
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
    """Refuses a GPU whose limits are lower than kernels need and WebGPU guarantees."""
    for limit, (least, what) in _LEAST.items():
        if limits[limit] < least:
            raise DeviceError(
                f"{name} supports only {limits[limit]:,} {what} ({limit}), but training requires "
                f"{least:,}: update its driver, or choose another GPU (device.gpu)"
            )
    for limit in _MOST:
        if limits[limit] > ALIGNMENT:
            raise DeviceError(
                f"{name} requires buffers to be aligned to {limits[limit]:,} bytes ({limit}), but "
                f"they are aligned to {ALIGNMENT}: update its driver, or choose another GPU "
                "(device.gpu)"
            )


def most_invocations(limits: Mapping[str, int]) -> int:
    """Maximum invocations of a workgroup, all along its first dimension."""
    return min(limits[_INVOCATIONS], limits[_ALONG_X])


def most_bytes(limits: Mapping[str, int], *, in_textures: bool) -> int:
    most = min(limits["max-storage-buffer-binding-size"], limits["max-buffer-size"])
    if in_textures:
        most = min(most, TEXTURE_ROW * limits["max-texture-dimension-2d"])
    return int(most)


def beyond_textures(name: str, limits: Mapping[str, int]) -> str:
    """Why kernels for software GPUs cannot use textures; empty if they can."""
    limit = "max-storage-textures-per-shader-stage"
    if limits[limit] >= MOST_STORAGE_TEXTURES:
        return ""
    return (
        f"{name} supports only {limits[limit]:,} storage textures per shader ({limit}), but "
        f"kernels bind {MOST_STORAGE_TEXTURES}: operands are in buffers instead, which is slower"
    )
