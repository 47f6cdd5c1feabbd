"""What is known of a GPU by who made it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_FEW_REGISTERS = {"intel", "apple"}
_PCI_IDS = {0x8086: "intel", 0x106B: "apple"}


def has_few_registers(info: Mapping[str, Any]) -> bool:
    """Whether a GPU's invocations have 128 registers of 4 bytes, where others have some 250.

    Some drivers tell of themselves alone, not of the vendor; the GPU's name then begins with it.

    Args:
        info: What WebGPU tells of the GPU.
    """
    first = str(info.get("device", "")).lower().partition(" ")[0]
    names = {str(info.get("vendor", "")).lower(), first.removesuffix("(r)")}
    return not _FEW_REGISTERS.isdisjoint({*names, _PCI_IDS.get(info.get("vendor_id", 0), "")})
