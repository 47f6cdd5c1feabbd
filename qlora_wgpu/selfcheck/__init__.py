"""Whether a driver computes what the kernels say: every variant against its NumPy reference."""

from qlora_wgpu.selfcheck.cases import checks
from qlora_wgpu.selfcheck.results import (
    Result,
    check_device,
    check_launches,
    check_variant,
    ensure_sound,
    variants,
)

__all__ = [
    "Result",
    "check_device",
    "check_launches",
    "check_variant",
    "checks",
    "ensure_sound",
    "variants",
]
