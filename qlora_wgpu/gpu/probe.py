"""Probes of an opened device: features that some kernels rely on.

Work is divided among subgroups by a size that is fixed when a shader is compiled. Where a driver
chose another, results would be wrong without an error: each probe reads back which size it got.
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
_SIZES = (4, 8, 16)  # sizes that the kernels are written for


def subgroup_size(device: Device) -> int:
    """Measures a GPU's subgroup size by running a kernel.

    The drivers' own figures are sometimes wrong, and a broadcast or a texture that does not work
    would spoil every product. Where a size can be asked for, it is, once it is known.
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
    """What a GPU's matrix units can be used for."""

    shape: MatrixShape | None = None  # a product that they make rightly; None if there is none
    refusal: str = ""  # why units that the GPU lists are not used, if that is so


def matrix_units(device: Device) -> MatrixUnits:
    """Finds a product that a GPU's matrix units make rightly, the best first."""
    if "subgroup-matrix" not in device.features:
        return MatrixUnits()
    refusal = ""
    shapes = device.backend.matrix_shapes(device.gpu)
    for shape in shapes:
        problem = _problem(device, shape)
        if not problem:
            return MatrixUnits(shape)
        refusal = refusal or f"{shape}: {problem}"
    nothing = "no size of subgroups is certain, or no type or shape of products is of use here"
    return MatrixUnits(None, refusal or nothing)


def _problem(device: Device, shape: MatrixShape) -> str:
    """What is wrong with the tile that products on these units would be made of, if anything."""
    if shape.problem:
        return shape.problem
    few, deep = has_few_registers(device.gpu.info), takes_deep_tiles(device.gpu.info)
    tile = next(fitting_tiles(shape, device.limits, few_registers=few, deep=deep), None)
    if tile is None:
        return "no tile fits the limits of a workgroup"
    problems = (tile_problem(device, tile, with_rows=with_rows) for with_rows in (True, False))
    return next((problem for problem in problems if problem), "")


def tile_problem(device: Device, tile: MatrixTile, *, with_rows: bool) -> str:
    """What is wrong with a tile on this driver; empty if nothing is.

    It is made as in products: by as many subgroups, each of which makes another part, with the
    same strides and in the same order of rows. Which dimension is which, and what is a row, has
    been confused upstream; no part of the product commutes.
    """
    depth = 2 * tile.depth
    random = np.random.default_rng(0)
    # Small whole numbers, so that every sum is exact.
    left = random.integers(-5, 6, (tile.rows, depth)).astype(np.float32)
    right = random.integers(-6, 7, (tile.columns, depth)).astype(np.float32)
    given = {"x": left, "w": right if with_rows else np.ascontiguousarray(right.T)}
    sizes = {"y": 4 * tile.rows * tile.columns, "seen": 16 * tile.invocations}
    # Results go through workgroup memory in the one kind, straight to y in the other.
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
        return f"refused ({textwrap.shorten(str(err), 300)})"
    seen = np.frombuffer(results["seen"], np.uint32).reshape(-1, 4)
    size, subgroups = int(seen[0, 0]), tile.groups_m * tile.groups_n
    own = np.arange(tile.invocations)
    threads = tile.shape.threads
    expected = [np.full_like(own, threads), np.full_like(own, subgroups)]
    if not np.array_equal(seen, np.stack([*expected, own // threads, own % threads], 1)):
        return f"subgroups have {size} invocations, not {threads}, or are numbered otherwise"
    product = np.frombuffer(results["y"], np.float32).reshape(tile.rows, tile.columns)
    return "" if np.array_equal(product, left @ right.T) else "wrong products"


def _run(
    device: Device, shader: Shader, given: dict[str, Any], sizes: dict[str, int]
) -> dict[str, memoryview]:
    """Runs one workgroup of a shader of plain buffers; what it writes, by name."""
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
    """A software GPU's subgroup size, 0 if it is of no use, and what a user should know of that."""
    if problem := beyond_textures(device.name, device.raw.limits):
        return 0, problem
    tried = f"subgroups {_driver(device)}"
    if has_crashed(tried):
        return 0, (
            f"{device.name} ended the process when its textures and subgroups were tried: operands "
            "lie in buffers instead, which is slower; update its driver"
        )
    with guarded_probe(tried, f"trying textures and subgroups of {device.name}"):
        return subgroup_size(device), ""


def try_matrix_units(device: Device) -> MatrixUnits:
    """What a GPU's matrix units can be used for."""
    tried = f"matrix units {_driver(device)}"
    if has_crashed(tried):
        return MatrixUnits(None, "the driver ended the process when they were tried")
    with guarded_probe(tried, f"trying the matrix units of {device.name}"):
        return matrix_units(device)


def _driver(device: Device) -> str:
    """The GPU, its driver, and this version, which may ask other things of them."""
    description = device.gpu.info["description"]
    return " ".join(map(str, (device.name, description, device.backend.name, __version__)))
