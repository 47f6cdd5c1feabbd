"""What is known of a GPU by who made it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FEW_REGISTERS = ("apple", "intel")  # by WebGPU's names of vendors
_HOIST_LOADS = {"qualcomm"}
_WITH_UNITS = {"amd", "apple", "intel", "nvidia"}
_IDS = {0x8086: "intel", 0x106B: "apple", 0x5143: "qualcomm", 0x4D4F4351: "qualcomm",
        0x10DE: "nvidia", 0x1002: "amd"}  # fmt: skip


def has_few_registers(info: Mapping[str, Any]) -> bool:
    """Whether a GPU's invocations have 128 registers of 4 bytes, where others have some 250.

    Args:
        info: What WebGPU tells of the GPU.
    """
    return not _names(info).isdisjoint(FEW_REGISTERS)


def hoists_loads(info: Mapping[str, Any]) -> bool:
    """Whether a GPU's compiler loads all of straight-line code first, and spills what it loaded.

    Args:
        info: What WebGPU tells of the GPU.
    """
    return not _HOIST_LOADS.isdisjoint(_names(info))


def takes_deep_tiles(info: Mapping[str, Any]) -> bool:
    """Whether products on a GPU's matrix units are the fastest in deep tiles (measured: an H100).

    Args:
        info: What WebGPU tells of the GPU.
    """
    return "nvidia" in _names(info)


def may_have_matrix_units(info: Mapping[str, Any]) -> bool:
    """Whether a GPU is of a vendor whose newer ones have matrix units that kernels can use.

    Args:
        info: What WebGPU tells of the GPU.
    """
    return not _WITH_UNITS.isdisjoint(_names(info))


def _names(info: Mapping[str, Any]) -> set[str]:
    """What may be the vendor's name.

    Some drivers tell of themselves alone, not of the vendor; the GPU's name then begins with it.
    """
    first = str(info.get("device", "")).lower().partition(" ")[0]
    told = str(info.get("vendor", "")).lower()
    return {told, first.removesuffix("(r)"), _IDS.get(info.get("vendor_id", 0), "")}
