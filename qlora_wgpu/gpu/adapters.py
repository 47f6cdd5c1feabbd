"""The GPUs of this machine, including Mesa's software GPU, and the choice of one."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from qlora_wgpu.cache_folder import cache_path, make_cache_folder
from qlora_wgpu.errors import DeviceError
from qlora_wgpu.files import file_bytes
from qlora_wgpu.gpu.backend import Backend
from qlora_wgpu.gpu.dawn import Dawn
from qlora_wgpu.gpu.driver import guarded_probe, has_crashed
from qlora_wgpu.gpu.wgpu_native import WgpuNative
from qlora_wgpu.limits import MIB
from qlora_wgpu.version import __version__

# ---- Mesa's software GPU ---------------------------------------------------------------------

_THREADS_PER_PROCESSOR = 2  # with more, waking them costs more than it gains
_MOST_THREADS = 16  # Mesa's maximum
_WIDTH = "LP_NATIVE_VECTOR_WIDTH"
_WIDTHS = (128, 256, 512)  # bits: Mesa 22 and 26 crash or hang with others
_FAMILY = re.compile(r"^cpu family\s*:\s*(\d+)$", re.MULTILINE)
_ZEN_5 = 26  # AMD's first family that executes 512-bit instructions in one pass
_LANES_OF_256_BITS, _LANES_OF_512_BITS = 8, 16


def add_software_threads(environ: MutableMapping[str, str]) -> None:
    """Lets Mesa's software GPU use two threads per processor.

    Mesa gives each thread an equal share of a launch in advance and then waits for the last one:
    with one thread per processor, a preempted thread delays the launch. Smaller shares even that
    out. The user's setting takes precedence. Must be called before the driver is loaded.
    """
    threads = min(_THREADS_PER_PROCESSOR * _processors(), _MOST_THREADS)
    environ.setdefault("LP_NUM_THREADS", str(threads))


def widen_software_vectors(environ: MutableMapping[str, str]) -> None:
    """Lets Mesa's software GPU use 512-bit vectors if the processor is faster with them.

    On AMD's it doubles lavapipe's speed, whose default is 256 bits. On Intel's (Sapphire Rapids)
    products are a fifth faster, but memory-bound kernels half as fast, so that a step is slower.
    Mesa's shader cache does not distinguish widths, so any other width than its default, also the
    user's, gets its own cache folder. The user's setting takes precedence. Must be called before
    the driver is loaded.
    """
    if _WIDTH not in environ:
        if not _gains_by_512_bits():
            return
        environ[_WIDTH] = "512"
    _check_width(environ[_WIDTH])
    if not {"MESA_SHADER_CACHE_DIR", "MESA_SHADER_CACHE_DISABLE"} & environ.keys():
        folder = cache_path(f"mesa-{environ[_WIDTH]}")
        try:
            make_cache_folder(folder)  # Mesa only creates the last folder
        except OSError:
            environ["MESA_SHADER_CACHE_DISABLE"] = "true"  # else it warns on stderr
        else:
            environ["MESA_SHADER_CACHE_DIR"] = str(folder)


def _check_width(text: str) -> None:
    try:
        width = int(text, 0)  # as Mesa reads it
    except ValueError:
        return  # which Mesa ignores
    if width not in _WIDTHS:
        raise DeviceError(
            f"{_WIDTH} must be {', '.join(map(str, _WIDTHS[:-1]))} or {_WIDTHS[-1]}, got {text}, "
            "with which Mesa's software GPU crashes: change or unset it"
        )


def rows_of_products(subgroup_size: int) -> int:
    """The best number of result rows per invocation of a product on this processor.

    More rows load less, but make longer loops, and AMD's processors stall on instructions that do
    not fit their caches. Up to family 25 (Zen 4), with 256 bits, that is 4,096 decoded ones at best
    (``wants_short_loops``): the loop over 16 rows has 3,500 and is too long, over 10 rows 2,500.
    Family 26 (Zen 5) executes 512 bits in one pass; of the 55 KB of 32 rows 32 KB fit, of 16 rows
    all 30 KB.
    """
    if wants_short_loops(subgroup_size):
        return 10
    waits = subgroup_size == _LANES_OF_512_BITS and _family_of_amd() >= _ZEN_5
    return 16 if waits else 32


def wants_short_loops(subgroup_size: int) -> bool:
    """Whether loops should have at most 2,500 instructions on this processor.

    AMD's up to family 25, with 256 bits, cache at most 4,096 decoded instructions and decode the
    others again in every iteration.
    """
    return _is_before_zen_5(subgroup_size)


def wants_textures(subgroup_size: int) -> bool:
    """Whether kernels should read everything possible from textures on this processor.

    Mesa reads a buffer word by word into a vector on the stack, and then loads the whole vector:
    AMD's processors up to family 25, with 256 bits, stall on each until the words are in the cache,
    25 ns for 16 bytes compared to 3 ns from a texture.
    """
    return _is_before_zen_5(subgroup_size)


def _is_before_zen_5(subgroup_size: int) -> bool:
    return subgroup_size == _LANES_OF_256_BITS and 0 < _family_of_amd() < _ZEN_5


def _family_of_amd() -> int:
    cpu = _cpu()
    return max(map(int, _FAMILY.findall(cpu)), default=0) if "AuthenticAMD" in cpu else 0


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _gains_by_512_bits() -> bool:
    # Mesa's 512-bit code requires these parts of AVX-512.
    needed = {"AuthenticAMD", "avx512f", "avx512dq", "avx512bw", "avx512vl"}
    return needed <= set(_cpu().split())


def _cpu() -> str:
    try:
        return file_bytes("/proc/cpuinfo", 16 * MIB).decode("ascii", "ignore")
    except OSError:
        return ""


# ---- adapters --------------------------------------------------------------------------------

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (WgpuNative(), Dawn())}
BACKEND_VARIABLE = "QLORA_WGPU_BACKEND"
API_VARIABLE = "WGPU_BACKEND_TYPE"
"""wgpu-py's: the only native API to use, as ``Vulkan`` or ``D3D12``."""

# Native APIs, preferred first: Vulkan has matrix units and fast compilers.
_APIS = {"darwin": ("Metal",), "win32": ("Vulkan", "D3D12")}
_TYPE_ORDER = {"DiscreteGPU": 0, "IntegratedGPU": 1, "Unknown": 2, "CPU": 3}
_FASTEST_SOFTWARE = "llvmpipe"  # lavapipe's name for itself; SwiftShader is several times slower

INSTALL_HINT = (
    "install your graphics card's Vulkan driver, or on Debian and Ubuntu the software GPU "
    "with: apt-get install mesa-vulkan-drivers"
)
_DAWN_HINT = (
    "Dawn lists no GPU: it requires a newer driver than wgpu (Mesa 25 or later); "
    "use device.backend: wgpu, or "
)


@dataclass(frozen=True)
class FoundAdapter:
    """An adapter, and the implementation that listed it."""

    raw: Any
    backend: Backend

    @property
    def name(self) -> str:
        return str(self.raw.info["device"])

    @property
    def is_cpu(self) -> bool:
        return bool(self.raw.info["adapter_type"] == "CPU")

    @property
    def slowness(self) -> tuple[int, bool]:
        kind = _TYPE_ORDER.get(self.raw.info["adapter_type"], 2)
        return kind, self.is_cpu and _FASTEST_SOFTWARE not in self.name.lower()


def installed_backends() -> list[Backend]:
    """The implementations whose package is installed, the default one first."""
    return [backend for backend in BACKENDS.values() if find_spec(backend.package) is not None]


def list_adapters(backend: str = "auto") -> list[FoundAdapter]:
    """Lists the usable adapters, the fastest kind first.

    Args:
        backend: ``"wgpu"``, ``"dawn"``, or ``"auto"``: wgpu, unless wgpudawn is installed and
        supports a GPU's matrix units, or both find only software GPUs and wgpu none that is
        faster. QLORA_WGPU_BACKEND overrides ``"auto"``.
    """
    if backend == "auto":
        backend = os.environ.get(BACKEND_VARIABLE) or "auto"
    if backend == "auto":
        return _automatic()
    if backend not in BACKENDS:
        named = f" ({BACKEND_VARIABLE})" if backend == os.environ.get(BACKEND_VARIABLE) else ""
        known = " or ".join((", ".join(("auto", *list(BACKENDS)[:-1])), list(BACKENDS)[-1]))
        raise DeviceError(f"unknown backend {backend!r}{named}: set device.backend to {known}")
    return _listed(BACKENDS[backend])


def cards(backend: str = "auto") -> list[str]:
    """The indices in ``list_adapters`` of all hardware GPUs."""
    return [str(i) for i, adapter in enumerate(list_adapters(backend)) if not adapter.is_cpu]


def choose_adapter(gpu: str = "auto", backend: str = "auto") -> FoundAdapter:
    """Picks an adapter.

    Args:
        gpu: ``"auto"``, an index into ``list_adapters()``, or part of an adapter's name.
        backend: ``"auto"``, ``"wgpu"`` or ``"dawn"``, as for ``list_adapters``.
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
    raise DeviceError(f"no GPU matches {gpu!r} (available: {names})")


def no_gpu(backend: str = "auto") -> DeviceError:
    """The error if no GPU is listed: what to install, and which GPU is not usable."""
    asked = os.environ.get(BACKEND_VARIABLE) if backend == "auto" else backend
    hint = _DAWN_HINT if asked == "dawn" else ""
    native = BACKENDS["wgpu" if asked not in BACKENDS else asked]
    try:
        others = {(str(a.info["device"]), str(a.info["backend_type"])) for a in native.adapters()}
    except Exception:  # nothing to add
        others = set()
    if others:
        name, api = min(others)
        return DeviceError(
            f"no GPU was found: {name} only supports {api}, which is not sufficient for "
            f"training; {hint}{INSTALL_HINT}"
        )
    return DeviceError(f"no GPU was found: {hint}{INSTALL_HINT}")


def _automatic() -> list[FoundAdapter]:
    dawn = BACKENDS["dawn"]
    if find_spec(dawn.package) is not None:
        try:
            adapters = _listed(dawn)
        except DeviceError:
            adapters = []
        # Dawn is faster with matrix units, and on lavapipe because of its compiler.
        if any(dawn.matrix_shapes(adapter.raw) for adapter in adapters):
            return adapters
        if adapters and adapters[0].is_cpu:
            others = _listed(BACKENDS["wgpu"])
            # Dawn does not support every driver that wgpu does: a GPU may be missing.
            faster = others and others[0].slowness < adapters[0].slowness
            return others if faster else adapters
    return _listed(BACKENDS["wgpu"])


def _listed(backend: Backend) -> list[FoundAdapter]:
    # Vulkan's loader prints a warning to stderr if this is unset, as in containers.
    os.environ.setdefault("XDG_RUNTIME_DIR", os.environ.get("TMPDIR", "/tmp"))
    widen_software_vectors(os.environ)
    add_software_threads(os.environ)
    apis = _apis_without_crash(backend)
    try:
        with guarded_probe(_listing(backend, apis), f"listing GPUs through {backend.package}"):
            adapters = backend.adapters(apis)
            for adapter in adapters:  # some of AMD's drivers crash when they are asked this
                backend.matrix_shapes(adapter)
    except DeviceError:
        raise
    except Exception as err:
        raise DeviceError(f"cannot list GPUs ({err}): {INSTALL_HINT}") from err
    usable = [FoundAdapter(adapter, backend) for adapter in _one_api_a_card(adapters)]
    return sorted(usable, key=lambda adapter: adapter.slowness)


def _usable_apis() -> tuple[str, ...]:
    """This system's APIs, preferred first, or the one that the user set."""
    every = _APIS.get(sys.platform, ("Vulkan",))
    wanted = os.environ.get(API_VARIABLE)
    if not wanted:
        return every
    if wanted not in every:
        raise DeviceError(f"{API_VARIABLE} must be {' or '.join(every)} here, got {wanted!r}")
    return (wanted,)


def _apis_without_crash(backend: Backend) -> tuple[str, ...]:
    """The APIs to list GPUs of, without one whose drivers crashed before; () for all."""
    usable = _usable_apis()
    first = usable if os.environ.get(API_VARIABLE) else ()
    for apis in (first, *((api,) for api in usable[1:] if backend.leaves_out)):
        if not has_crashed(_listing(backend, apis)):
            return apis
    raise DeviceError(
        f"two processes crashed while {backend.package} listed GPUs: update the graphics driver, "
        f"set {API_VARIABLE}, or choose another device.backend"
    )


def _listing(backend: Backend, apis: tuple[str, ...]) -> str:
    """What is remembered if it crashes."""
    return " ".join(("listing", backend.name, *apis, __version__))


def _one_api_a_card(adapters: list[Any]) -> list[Any]:
    """Each GPU once, by its best API; several GPUs of one kind are all listed."""
    taken: list[Any] = []
    for api in _usable_apis():
        known = {name for adapter in taken for name in _names(adapter)}
        listed = [adapter for adapter in adapters if adapter.info["backend_type"] == api]
        taken += [adapter for adapter in listed if not known & _names(adapter)]
    return taken


def _names(adapter: Any) -> set[Any]:
    """What identifies a GPU across APIs: its name, and its PCI ids if known."""
    numbers = (adapter.info.get("vendor_id"), adapter.info.get("device_id"))
    return {adapter.info["device"], *([numbers] if all(numbers) else [])}
