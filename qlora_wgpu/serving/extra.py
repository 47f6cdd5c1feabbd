"""The server library, an extra."""

from __future__ import annotations

import importlib.util

from qlora_wgpu.errors import ConfigError


def require_server() -> None:
    """Sees that it is installed."""
    missing = [n for n in ("starlette", "uvicorn") if importlib.util.find_spec(n) is None]
    if missing:
        raise ConfigError(f"serve needs {' and '.join(missing)}: pip install 'qlora-wgpu[serve]'")
