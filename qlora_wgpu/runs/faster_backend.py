"""What a machine would gain by the WebGPU implementation that it has not installed."""

from __future__ import annotations

import os
import re

from qlora_wgpu.gpu.adapters import BACKEND_VARIABLE, BACKENDS, installed_backends
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.kernel_config import may_have_matrix_units

_FASTER_SINCE = 25  # of Mesa: its later software GPUs are slow through wgpu


def faster_through_dawn(device: Device, backend: str) -> str:
    """A sentence where Dawn may be the faster one; empty where it is there, or wgpu was asked for.

    Args:
        device: What was opened.
        backend: The ``device.backend`` that it was opened by.
    """
    dawn = BACKENDS["dawn"]
    asked = os.environ.get(BACKEND_VARIABLE, "auto") if backend == "auto" else backend
    if asked != "auto" or dawn in installed_backends():
        return ""
    info, install = device.gpu.info, f"pip install {dawn.requirement}"
    if not device.is_cpu:
        if not may_have_matrix_units(info):
            return ""
        return (
            f"{device.name} may have matrix units, which make steps faster and which kernels reach "
            f"through Dawn alone: {install} (docs/performance.md)"
        )
    mesa = re.search(r"\bMesa (\d+)", info["description"])
    if mesa is None or int(mesa[1]) < _FASTER_SINCE:
        return ""
    return f"with {mesa[0]} steps take about half as long through Dawn: {install}"
