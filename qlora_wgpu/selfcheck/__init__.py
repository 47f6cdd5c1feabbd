"""Checks of a driver: all kernel variants against NumPy references."""

from qlora_wgpu.selfcheck.cases import checks
from qlora_wgpu.selfcheck.results import (
    Result,
    avoid_what_is_wrong,
    check_device,
    check_launches,
    check_own_cases,
    check_variant,
    ensure_sound,
    give_way,
    num_checks,
    num_own_cases,
    problem_of,
    unsound,
    variants,
)

__all__ = [
    "Result",
    "avoid_what_is_wrong",
    "check_device",
    "check_launches",
    "check_own_cases",
    "check_variant",
    "checks",
    "ensure_sound",
    "give_way",
    "num_checks",
    "num_own_cases",
    "problem_of",
    "unsound",
    "variants",
]
