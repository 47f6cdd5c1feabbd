"""Whether a driver computes what the kernels say: every variant against its NumPy reference."""

from qlora_wgpu.selfcheck.checks import CHECKS
from qlora_wgpu.selfcheck.results import Result, check_device, ensure_sound, variants

__all__ = ["CHECKS", "Result", "check_device", "ensure_sound", "variants"]
