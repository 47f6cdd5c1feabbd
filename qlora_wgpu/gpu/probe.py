"""Probes of an open device: features that some kernels rely on.

Kernels divide work by a subgroup size that is fixed at compile time. If a driver chose another one,
results would be wrong without an error: each probe reads the actual size back.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from qlora_wgpu.errors import DeviceError
from qlora_wgpu.gpu.driver import guarded_probe, has_crashed
from qlora_wgpu.gpu.kernel_config import has_few_registers, takes_deep_tiles
from qlora_wgpu.gpu.limits import beyond_textures
from qlora_wgpu.gpu.matrix import MatrixShape, MatrixTile, fitting_tiles
from qlora_wgpu.gpu.operands import Bound
from qlora_wgpu.gpu.wgsl import Constant, Shader, load_shader
from qlora_wgpu.version import __version__

if TYPE_CHECKING:
    from qlora_wgpu.gpu.device import Device

_INVOCATIONS = 64
_POISON = 0x7FC17FC1  # NaN
_SIZES = (4, 8, 16)  # supported by the kernels


def subgroup_size(device: Device) -> int:
    """Measures a GPU's subgroup size by running a kernel.

    Drivers sometimes report wrong sizes, and broken broadcasts or textures would make every product
    wrong. Once the size is known, it is requested if possible.
    """
    if "subgroups" not in device.features:
        return 0
    size = _broadcast_size(device)
    if size and "subgroup-size-control" in device.features:
        size = _broadcast_size(device, SUBGROUP_SIZE=size)
    return size


def _broadcast_size(device: Device, **constants: Constant) -> int:
    texels = np.arange(4 * _INVOCATIONS, dtype=np.uint32).reshape(_INVOCATIONS, 4) + 1000
    try:
        shader = load_shader("probe/subgroup.wgsl", tuple(constants.items()))
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


@dataclass(frozen=True)
class MatrixUnits:
    """A GPU's usable matrix units."""

    shape: MatrixShape | None = None  # a product that they compute correctly, if any
    refusal: str = ""  # why reported units are not used, if that is so


def matrix_units(device: Device) -> MatrixUnits:
    """Finds the best product that a GPU's matrix units compute correctly."""
    if "subgroup-matrix" not in device.features:
        return MatrixUnits()
    refusal = ""
    shapes = device.backend.matrix_shapes(device.gpu)
    for shape in shapes:
        problem = _problem(device, shape)
        if not problem:
            return MatrixUnits(shape)
        refusal = refusal or f"{shape}: {problem}"
    nothing = "the subgroup size is uncertain, or no type or shape of products is supported"
    return MatrixUnits(None, refusal or nothing)


def _problem(device: Device, shape: MatrixShape) -> str:
    if shape.problem:
        return shape.problem
    few, deep = has_few_registers(device.gpu.info), takes_deep_tiles(device.gpu.info)
    tile = next(fitting_tiles(shape, device.limits, few_registers=few, deep=deep), None)
    if tile is None:
        return "no tile is within the limits of a workgroup"
    problems = (tile_problem(device, tile, with_rows=with_rows) for with_rows in (True, False))
    return next((problem for problem in problems if problem), "")


def tile_problem(device: Device, tile: MatrixTile, *, with_rows: bool) -> str:
    """What is wrong with a tile on this driver; empty if nothing.

    It is computed as in products: by the same number of subgroups, each with its own part, strides
    and order of rows. Implementations have swapped dimensions and row order before; no part of this
    product commutes.
    """
    depth = 2 * tile.depth
    random = np.random.default_rng(0)
    # Small integers, so that every sum is exact.
    left = random.integers(-5, 6, (tile.rows, depth)).astype(np.float32)
    right = random.integers(-6, 7, (tile.columns, depth)).astype(np.float32)
    given = {"x": left, "w": right if with_rows else np.ascontiguousarray(right.T)}
    sizes = {"y": 4 * tile.rows * tile.columns, "seen": 16 * tile.invocations}
    # One variant stores results through workgroup memory, the other directly.
    constants = {
        **tile.constants(with_rows=with_rows),
        "DEPTH": depth,
        "DIRECT": not with_rows,
        "ACCUMULATE": False,
        "TERM": False,
        "WHOLE_K": True,
        "RUNS": True,
        "SIZED_PARTS": False,
        "LOADS": False,
        "RESIDUAL": False,
    }
    floats = Bound("float32")
    shader = load_shader(
        "probe/matrix.wgsl", tuple(sorted(constants.items())), (("w", floats), ("x", floats))
    )
    try:
        results = _run(device, shader, given, sizes)
    except DeviceError as err:
        return f"rejected ({textwrap.shorten(str(err), 300)})"
    seen = np.frombuffer(results["seen"], np.uint32).reshape(-1, 4)
    size, subgroups = int(seen[0, 0]), tile.groups_m * tile.groups_n
    own = np.arange(tile.invocations)
    threads = tile.shape.threads
    expected = [np.full_like(own, threads), np.full_like(own, subgroups)]
    if not np.array_equal(seen, np.stack([*expected, own // threads, own % threads], 1)):
        return f"expected subgroups of {threads} invocations in order, got {size}"
    product = np.frombuffer(results["y"], np.float32).reshape(tile.rows, tile.columns)
    return "" if np.array_equal(product, left @ right.T) else "wrong products"


def _run(
    device: Device, shader: Shader, given: dict[str, Any], sizes: dict[str, int]
) -> dict[str, memoryview]:
    buffers = {name: device.buffer(array.nbytes, "probe") for name, array in given.items()}
    for name, array in given.items():
        device.write(buffers[name], array)
    results = {name: device.buffer(size, "probe") for name, size in sizes.items()}
    for name, size in sizes.items():
        device.write(results[name], np.full(size // 4, _POISON, np.uint32))
    windows = {name: (buffers[name], 0, array.nbytes) for name, array in given.items()}
    windows |= {name: (results[name], 0, size) for name, size in sizes.items()}
    group = device.bind_group(shader, windows)
    device.dispatch(device.pipeline(shader), group, (1, 1, 1))
    return {name: device.read(results[name], size) for name, size in sizes.items()}


def try_subgroups(device: Device) -> tuple[int, str]:
    """A software GPU's subgroup size, 0 if unusable, and a note for the user."""
    if problem := beyond_textures(device.name, device.raw.limits):
        return 0, problem
    tried = f"subgroups {_driver(device)}"
    if has_crashed(tried):
        return 0, (
            f"{device.name} crashed when its textures and subgroups were tested: operands are in "
            "buffers instead, which is slower; update its driver"
        )
    with guarded_probe(tried, f"testing textures and subgroups of {device.name}"):
        return subgroup_size(device), ""


def try_matrix_units(device: Device) -> MatrixUnits:
    tried = f"matrix units {_driver(device)}"
    if has_crashed(tried):
        return MatrixUnits(None, "the driver crashed when they were tested")
    with guarded_probe(tried, f"testing the matrix units of {device.name}"):
        return matrix_units(device)


def _driver(device: Device) -> str:
    """The GPU, its driver, and this version, whose probes may differ."""
    description = device.gpu.info["description"]
    return " ".join(map(str, (device.name, description, device.backend.name, __version__)))
