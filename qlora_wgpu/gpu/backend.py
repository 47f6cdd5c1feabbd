"""The WebGPU implementation: the only file that imports ``wgpu``.

What differs between implementations (features, private calls) is kept here, so that another
module with the same API can be put in its place.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from qlora_wgpu.errors import DeviceError

# Windows, macOS, Linux: one native API per card, so that no card is listed twice.
_PREFERRED_BACKENDS = {"darwin": ("Metal",), "win32": ("Vulkan", "D3D12")}.get(
    sys.platform, ("Vulkan",)
)
_TYPE_ORDER = {"DiscreteGPU": 0, "IntegratedGPU": 1, "Unknown": 2, "CPU": 3}
_WANTED_FEATURES = ("timestamp-query", "shader-f16", "subgroup", "subgroup-barrier")

INSTALL_HINT = (
    "install your graphics card's Vulkan driver, or on Debian and Ubuntu the software adapter "
    "with: apt-get install mesa-vulkan-drivers"
)


def webgpu() -> Any:
    """Imports and returns the WebGPU module.

    Raises:
        DeviceError: If it cannot be imported.
    """
    # Vulkan's loader prints a warning to stderr where this is unset, as in containers.
    os.environ.setdefault("XDG_RUNTIME_DIR", os.environ.get("TMPDIR", "/tmp"))
    widen_software_vectors(os.environ)
    try:
        import wgpu
    except Exception as err:
        raise DeviceError(f"the package wgpu cannot be loaded ({err}): pip install wgpu") from err
    return wgpu


def widen_software_vectors(environ: MutableMapping[str, str]) -> None:
    """Lets Mesa's software adapter use 512-bit vectors where the processor has them.

    It doubles what lavapipe computes, which keeps to 256 bits by itself. Its shader cache does
    not tell the widths apart, so this one gets a folder of its own. What the user has set stays.
    Mesa reads both when its driver is loaded: it must be called before that.
    """
    if "LP_NATIVE_VECTOR_WIDTH" in environ or not _has_avx512():
        return
    environ["LP_NATIVE_VECTOR_WIDTH"] = "512"
    if not {"MESA_SHADER_CACHE_DIR", "MESA_SHADER_CACHE_DISABLE"} & environ.keys():
        home = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        folder = Path(home) / "qlora-wgpu" / "mesa-512"
        with contextlib.suppress(OSError):  # Mesa makes the last folder only
            folder.mkdir(parents=True, exist_ok=True)
        environ["MESA_SHADER_CACHE_DIR"] = str(folder)


def _has_avx512() -> bool:
    try:
        flags = set(Path("/proc/cpuinfo").read_text(encoding="ascii", errors="ignore").split())
    except OSError:
        return False
    # Mesa's code for 512 bits needs these parts of AVX-512.
    return {"avx512f", "avx512dq", "avx512bw", "avx512vl"} <= flags


def list_adapters() -> list[Any]:
    """Lists the usable adapters, the fastest kind first."""
    try:
        adapters = webgpu().gpu.enumerate_adapters_sync()
    except DeviceError:
        raise
    except Exception as err:
        raise DeviceError(f"no GPU adapter can be listed ({err}): {INSTALL_HINT}") from err
    usable = [a for a in adapters if a.info["backend_type"] in _PREFERRED_BACKENDS]
    return sorted(usable, key=lambda a: _TYPE_ORDER.get(a.info["adapter_type"], 2))


def choose_adapter(wanted: str = "auto") -> Any:
    """Picks an adapter.

    Args:
        wanted: ``"auto"``, an index into ``list_adapters()``, or part of an adapter's name.

    Raises:
        DeviceError: If there is no adapter, or none that fits.
    """
    adapters = list_adapters()
    if not adapters:
        raise DeviceError(f"no GPU adapter was found: {INSTALL_HINT}")
    if wanted == "auto":
        return adapters[0]
    if wanted.isdigit() and int(wanted) < len(adapters):
        return adapters[int(wanted)]
    for adapter in adapters:
        if wanted.lower() in adapter.info["device"].lower():
            return adapter
    names = ", ".join(f"{i}: {a.info['device']}" for i, a in enumerate(adapters))
    raise DeviceError(f"no adapter is called {wanted!r}; found {names} (device.adapter)")


def request_device(adapter: Any) -> Any:
    """Opens a device with the adapter's own limits and the few features that are used."""
    features = [name for name in _WANTED_FEATURES if name in adapter.features]
    try:
        return adapter.request_device_sync(required_features=features, required_limits={})
    except Exception as err:
        raise DeviceError(
            f"adapter {adapter.info['device']} gave no device ({err}): update its driver, "
            "or choose another with device.adapter"
        ) from err


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error of the WebGPU module means that the device has no memory left."""
    text = f"{type(error).__name__} {error}".lower()
    return "not enough memory" in text or "out of memory" in text or "outofmemory" in text
