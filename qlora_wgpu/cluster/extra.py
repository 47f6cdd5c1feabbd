"""The packages of the extra ``cluster``, which an installation may lack."""

from __future__ import annotations

from importlib.util import find_spec

from qlora_wgpu.errors import ConfigError

_NEEDED = ("distributed", "cryptography")


def require_extra() -> None:
    """Tells how the extra is installed where it is not."""
    if any(find_spec(package) is None for package in _NEEDED):
        raise ConfigError(
            "several GPUs and machines need the extra: pip install 'qlora-wgpu[cluster]'"
        )
