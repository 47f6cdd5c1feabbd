"""What kernels need of a GPU: what WebGPU promises, though some drivers list GPUs with less."""

from __future__ import annotations

from collections.abc import Mapping

from qlora_wgpu.errors import DeviceError
from qlora_wgpu.gpu.grid import MAX_WORKGROUPS
from qlora_wgpu.gpu.matrix import PROMISED
from qlora_wgpu.gpu.sizes import (
    ALIGNMENT,
    MOST_STORAGE_BUFFERS,
    MOST_STORAGE_TEXTURES,
    TEXTURE_ROW,
)

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
    """Refuses a GPU that allows less than WebGPU promises of what kernels need.

    Args:
        name: The GPU's.
        limits: Its limits, by wgpu's names.

    Raises:
        DeviceError: If it does; names the limit.
    """
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
    """Bytes of a tensor that a shader is shown as one.

    Args:
        limits: The GPU's, by wgpu's names.
        in_textures: Whether it may lie in a texture, too.
    """
    most = min(limits["max-storage-buffer-binding-size"], limits["max-buffer-size"])
    if in_textures:
        most = min(most, TEXTURE_ROW * limits["max-texture-dimension-2d"])
    return int(most)


def beyond_textures(name: str, limits: Mapping[str, int]) -> str:
    """Why kernels for software GPUs cannot read from textures; empty if they can.

    Args:
        name: The GPU's.
        limits: Its limits, by wgpu's names.
    """
    limit = "max-storage-textures-per-shader-stage"
    if limits[limit] >= MOST_STORAGE_TEXTURES:
        return ""
    return (
        f"{name} allows {limits[limit]:,} storage textures of a shader ({limit}), and kernels bind "
        f"{MOST_STORAGE_TEXTURES}: operands lie in buffers instead, which is slower"
    )
