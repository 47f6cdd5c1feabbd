"""Self-tests of what some kernels rest on: subgroup broadcasts, textures and matrix units."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from qlora_wgpu.errors import DeviceError
from qlora_wgpu.gpu.backend import MatrixShape
from qlora_wgpu.gpu.wgsl import load_shader

if TYPE_CHECKING:
    from qlora_wgpu.gpu.device import Device

_INVOCATIONS = 64
_SIZES = (4, 8, 16)  # sizes that the kernels are written for


def subgroup_size(device: Device) -> int:
    """Measures a GPU's subgroup size by running a kernel.

    The drivers' own figures are sometimes wrong, and a broadcast or a texture that does not work
    would spoil every product.

    Returns:
        The size, or 0 where it is not one the kernels know or anything came out wrong.
    """
    if "subgroups" not in device.features:
        return 0
    texels = np.arange(4 * _INVOCATIONS, dtype=np.uint32).reshape(_INVOCATIONS, 4) + 1000
    try:
        shader = load_shader("probe/subgroup.wgsl")
        texture = device.texture(texels.nbytes, "probe")
        seen = device.buffer(texels.nbytes, "probe")
        params = device.buffer(16, "probe")
        device.write_texture(texture, texels)
        device.write(params, shader.pack_params({"width": 1024}))
        group = device.bind_group(
            shader,
            {
                "params": (params, 0, 16),
                "texture": (texture, 0, texels.nbytes),
                "seen": (seen, 0, texels.nbytes),
            },
        )
        device.dispatch(device.pipeline(shader), group, (1, 1, 1))
        rows = np.frombuffer(device.read(seen, texels.nbytes), np.uint32).reshape(-1, 4)
    except DeviceError:
        return 0
    size = int(rows[0, 0])
    if size not in _SIZES:
        return 0
    own = np.arange(_INVOCATIONS)
    expected = np.stack(
        [np.full_like(own, size), own % size, texels[own // size * size + 3, 0], texels[own, 3]], 1
    )
    return size if np.array_equal(rows, expected) else 0


def matrix_shape(device: Device) -> MatrixShape | None:
    """Finds a product that a GPU's matrix units make rightly, the largest first.

    Which dimension is which, and what is a row, has been confused upstream: the product tried
    does not commute and its factors are no squares where the units' are none.
    """
    if "subgroup-matrix" not in device.features:
        return None
    shapes = device.backend.matrix_shapes(device.gpu)
    return next((shape for shape in shapes if _multiplies(device, shape)), None)


def _multiplies(device: Device, shape: MatrixShape) -> bool:
    m, n, k = shape.m, shape.n, shape.k
    # Small whole numbers, so that every sum is exact.
    left = (np.arange(m * k, dtype=np.float32) * 7 % 11 - 5).reshape(m, k)
    right = (np.arange(k * n, dtype=np.float32) * 5 % 13 - 6).reshape(k, n)
    constants = {"M": m, "N": n, "K": k, "LANES": shape.threads}
    try:
        shader = load_shader("probe/matrix.wgsl", tuple(sorted(constants.items())))
        sizes = {"left": left.nbytes, "right": right.nbytes, "result": 4 * m * n}
        buffers = {name: device.buffer(size, "probe") for name, size in sizes.items()}
        device.write(buffers["left"], left)
        device.write(buffers["right"], right)
        windows = {name: (buffers[name], 0, size) for name, size in sizes.items()}
        group = device.bind_group(shader, windows)
        device.dispatch(device.pipeline(shader), group, (1, 1, 1))
        product = np.frombuffer(device.read(buffers["result"], 4 * m * n), np.float32)
    except DeviceError:
        return False
    return np.array_equal(product.reshape(m, n), 2 * left @ right)
