"""The self-tests of a device that is opened, but for those that this driver has crashed at."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qlora_wgpu.gpu.attempts import attempt, has_crashed
from qlora_wgpu.gpu.probe import MatrixUnits, matrix_units, subgroup_size
from qlora_wgpu.gpu.required import beyond_textures
from qlora_wgpu.version import __version__

if TYPE_CHECKING:
    from qlora_wgpu.gpu.device import Device


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
    with attempt(tried, f"trying textures and subgroups of {device.name}"):
        return subgroup_size(device), ""


def try_matrix_units(device: Device) -> MatrixUnits:
    """What a GPU's matrix units can be used for."""
    tried = f"matrix units {_driver(device)}"
    if has_crashed(tried):
        return MatrixUnits(None, "the driver ended the process when they were tried")
    with attempt(tried, f"trying the matrix units of {device.name}"):
        return matrix_units(device)


def _driver(device: Device) -> str:
    """The GPU, its driver, and this version, which may ask other things of them."""
    description = device.gpu.info["description"]
    return " ".join(map(str, (device.name, description, device.backend.name, __version__)))
