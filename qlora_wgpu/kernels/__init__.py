"""Families of kernels as data: ops launch them, and tools enumerate them.

Each module or package here is a family. It may define ``KERNELS`` (``common.Kernel``) and
``TUNABLES`` (``common.Tunable``); no other registration is needed.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from qlora_wgpu.kernels.common import Kernel, Tunable


def kernels() -> list[Kernel[Any]]:
    return [kernel for module in _modules() for kernel in getattr(module, "KERNELS", ())]


def tunables() -> list[Tunable]:
    return [tunable for module in _modules() for tunable in getattr(module, "TUNABLES", ())]


def _modules() -> list[Any]:
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return [importlib.import_module(f"{__name__}.{name}") for name in names]
