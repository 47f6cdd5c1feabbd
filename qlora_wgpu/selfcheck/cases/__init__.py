"""Checks of kernels at odd shapes, against NumPy: every function ``check_…`` of a module here."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable

from qlora_wgpu.selfcheck.runner import Runner

_PREFIX = "check_"


def checks() -> dict[str, Callable[[Runner], None]]:
    """All checks by their names."""
    functions: dict[str, Callable[[Runner], None]] = {}
    for module in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        members = vars(importlib.import_module(f"{__name__}.{module}"))
        functions |= {
            name.removeprefix(_PREFIX): member
            for name, member in members.items()
            if name.startswith(_PREFIX)
        }
    return functions
