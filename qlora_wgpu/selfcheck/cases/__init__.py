"""Checks of kernels at odd shapes against NumPy: all functions ``check_…`` of the modules here."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qlora_wgpu.gpu.kernel_config import Profile
from qlora_wgpu.selfcheck.cases.common import arguments_of

_PREFIX = "check_"


@dataclass(frozen=True)
class Case:
    """A check with its arguments."""

    check: str  # the check's name
    function: Callable[..., None]  # takes a ``Runner`` and the arguments
    arguments: tuple[Any, ...]  # one of the function's decorated arguments
    in_textures: bool  # whether all possible tensors are in textures, instead of only required ones


def checks() -> dict[str, Callable[..., None]]:
    functions: dict[str, Callable[..., None]] = {}
    for module in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        members = vars(importlib.import_module(f"{__name__}.{module}"))
        functions |= {
            name.removeprefix(_PREFIX): member
            for name, member in members.items()
            if name.startswith(_PREFIX)
        }
    return functions


def cases_for(profile: Profile) -> list[Case]:
    """All checks with all arguments, in all kinds of memory that a profile's kernels use."""
    places = (False, True) if profile.textures else (False,)
    return [
        Case(name, function, arguments, in_textures)
        for name, function in checks().items()
        for arguments in arguments_of(function)
        for in_textures in places
    ]
