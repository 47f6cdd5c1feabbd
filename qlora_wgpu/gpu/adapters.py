"""Finding an adapter, and the WebGPU implementation through which it is opened."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from qlora_wgpu.errors import DeviceError
from qlora_wgpu.gpu.backend import Backend
from qlora_wgpu.gpu.dawn import Dawn
from qlora_wgpu.gpu.mesa import add_software_threads, widen_software_vectors
from qlora_wgpu.gpu.wgpu_native import WgpuNative

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (WgpuNative(), Dawn())}
BACKEND_VARIABLE = "QLORA_WGPU_BACKEND"

# Native APIs, the preferred first: matrix units, and compilers that take our kernels in moments,
# are Vulkan's.
_APIS = {"darwin": ("Metal",), "win32": ("Vulkan", "D3D12")}
_TYPE_ORDER = {"DiscreteGPU": 0, "IntegratedGPU": 1, "Unknown": 2, "CPU": 3}
_FASTEST_SOFTWARE = "llvmpipe"  # as lavapipe calls itself; SwiftShader takes several times as long

INSTALL_HINT = (
    "install your graphics card's Vulkan driver, or on Debian and Ubuntu the software GPU "
    "with: apt-get install mesa-vulkan-drivers"
)
_DAWN_HINT = (
    "Dawn lists no GPU: it needs a newer driver than wgpu does (of Mesa's, 25 or later); "
    "use device.backend: wgpu, or "
)


@dataclass(frozen=True)
class FoundAdapter:
    """An adapter, and the implementation that listed it."""

    raw: Any
    backend: Backend

    @property
    def name(self) -> str:
        """The name that the driver gives."""
        return str(self.raw.info["device"])

    @property
    def is_cpu(self) -> bool:
        """Whether it is a software GPU."""
        return bool(self.raw.info["adapter_type"] == "CPU")

    @property
    def slowness(self) -> tuple[int, bool]:
        """What adapters are ordered by, the fastest kind first."""
        kind = _TYPE_ORDER.get(self.raw.info["adapter_type"], 2)
        return kind, self.is_cpu and _FASTEST_SOFTWARE not in self.name.lower()


def installed_backends() -> list[Backend]:
    """The implementations whose package is there, the default one first."""
    return [backend for backend in BACKENDS.values() if find_spec(backend.package) is not None]


def list_adapters(backend: str = "auto") -> list[FoundAdapter]:
    """Lists the usable adapters, the fastest kind first.

    Args:
        backend: ``"wgpu"``, ``"dawn"``, or ``"auto"``: wgpu, unless wgpudawn is installed and
            offers a GPU's matrix units, or finds a software GPU only and wgpu none that is
            faster. The environment's QLORA_WGPU_BACKEND says what ``"auto"`` is.

    Raises:
        DeviceError: If the implementation cannot be loaded or fails.
    """
    if backend == "auto":
        backend = os.environ.get(BACKEND_VARIABLE) or "auto"
    if backend == "auto":
        return _automatic()
    if backend not in BACKENDS:
        named = f" ({BACKEND_VARIABLE})" if backend == os.environ.get(BACKEND_VARIABLE) else ""
        known = " or ".join((", ".join(("auto", *list(BACKENDS)[:-1])), list(BACKENDS)[-1]))
        raise DeviceError(f"there is no backend {backend!r}{named}: set device.backend to {known}")
    return _listed(BACKENDS[backend])


def cards(backend: str = "auto") -> list[str]:
    """The indices in ``list_adapters`` of all GPUs that are none of software.

    Raises:
        DeviceError: If the implementation cannot be loaded or fails.
    """
    return [str(i) for i, adapter in enumerate(list_adapters(backend)) if not adapter.is_cpu]


def choose_adapter(gpu: str = "auto", backend: str = "auto") -> FoundAdapter:
    """Picks an adapter.

    Args:
        gpu: ``"auto"``, an index into ``list_adapters()``, or part of an adapter's name.
        backend: ``"auto"``, ``"wgpu"`` or ``"dawn"``, as for ``list_adapters``.

    Raises:
        DeviceError: If there is no adapter, or none that fits.
    """
    adapters = list_adapters(backend)
    if not adapters:
        raise no_gpu(backend)
    if gpu == "auto":
        return adapters[0]
    if gpu.isdigit() and int(gpu) < len(adapters):
        return adapters[int(gpu)]
    for adapter in adapters:
        if gpu.lower() in adapter.name.lower():
            return adapter
    names = ", ".join(f"{i}: {a.name}" for i, a in enumerate(adapters))
    raise DeviceError(f"no GPU is called {gpu!r}: choose one of these: {names} (device.gpu)")


def no_gpu(backend: str = "auto") -> DeviceError:
    """What is told where no GPU is listed: what to install, and which one is out of reach."""
    asked = os.environ.get(BACKEND_VARIABLE) if backend == "auto" else backend
    hint = _DAWN_HINT if asked == "dawn" else ""
    native = BACKENDS["wgpu" if asked not in BACKENDS else asked]
    try:
        others = {(str(a.info["device"]), str(a.info["backend_type"])) for a in native.adapters()}
    except Exception:  # there is nothing to add then
        others = set()
    if others:
        name, api = min(others)
        return DeviceError(
            f"no GPU was found: {name} is reached through {api} alone, which is not enough to "
            f"train; {hint}{INSTALL_HINT}"
        )
    return DeviceError(f"no GPU was found: {hint}{INSTALL_HINT}")


def _automatic() -> list[FoundAdapter]:
    dawn = BACKENDS["dawn"]
    if find_spec(dawn.package) is not None:
        try:
            adapters = _listed(dawn)
        except DeviceError:
            adapters = []
        # Its matrix units on GPUs, and on lavapipe its compiler's code, are the faster ones.
        if any(dawn.matrix_shapes(adapter.raw) for adapter in adapters):
            return adapters
        if adapters and adapters[0].is_cpu:
            others = _listed(BACKENDS["wgpu"])
            # It does not list every driver that wgpu does: that of a card may be among these.
            faster = others and others[0].slowness < adapters[0].slowness
            return others if faster else adapters
    return _listed(BACKENDS["wgpu"])


def _listed(backend: Backend) -> list[FoundAdapter]:
    # Vulkan's loader prints a warning to stderr where this is unset, as in containers.
    os.environ.setdefault("XDG_RUNTIME_DIR", os.environ.get("TMPDIR", "/tmp"))
    widen_software_vectors(os.environ)
    add_software_threads(os.environ)
    try:
        adapters = backend.adapters()
    except DeviceError:
        raise
    except Exception as err:
        raise DeviceError(f"no GPU can be listed ({err}): {INSTALL_HINT}") from err
    usable = [FoundAdapter(adapter, backend) for adapter in _one_api_a_card(adapters)]
    return sorted(usable, key=lambda adapter: adapter.slowness)


def _one_api_a_card(adapters: list[Any]) -> list[Any]:
    """Each card once, by the best API that lists it; cards of one kind stay as many as they are."""
    taken: list[Any] = []
    for api in _APIS.get(sys.platform, ("Vulkan",)):
        known = {name for adapter in taken for name in _names(adapter)}
        listed = [adapter for adapter in adapters if adapter.info["backend_type"] == api]
        taken += [adapter for adapter in listed if not known & _names(adapter)]
    return taken


def _names(adapter: Any) -> set[Any]:
    """What tells a card by two APIs: its name, and its numbers on the bus, if they are known."""
    numbers = (adapter.info.get("vendor_id"), adapter.info.get("device_id"))
    return {adapter.info["device"], *([numbers] if all(numbers) else [])}
