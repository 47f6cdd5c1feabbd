"""Settings of Mesa's software GPU, lavapipe, which it reads when its driver is loaded."""

from __future__ import annotations

from collections.abc import MutableMapping

from qlora_wgpu.cache_folder import cache_path, make_cache_folder
from qlora_wgpu.files import file_bytes
from qlora_wgpu.limits import MIB


def widen_software_vectors(environ: MutableMapping[str, str]) -> None:
    """Lets Mesa's software GPU use 512-bit vectors where the processor has them.

    It doubles what lavapipe computes, which keeps to 256 bits by itself. Its shader cache does
    not tell the widths apart, so this one gets a folder of its own. What the user has set stays.
    It must be called before the driver is loaded.
    """
    if "LP_NATIVE_VECTOR_WIDTH" in environ or not _has_avx512():
        return
    environ["LP_NATIVE_VECTOR_WIDTH"] = "512"
    if not {"MESA_SHADER_CACHE_DIR", "MESA_SHADER_CACHE_DISABLE"} & environ.keys():
        folder = cache_path("mesa-512")
        try:
            make_cache_folder(folder)  # Mesa makes the last folder only
        except OSError:
            environ["MESA_SHADER_CACHE_DISABLE"] = "true"  # else it complains on stderr
        else:
            environ["MESA_SHADER_CACHE_DIR"] = str(folder)


def _has_avx512() -> bool:
    try:
        flags = set(file_bytes("/proc/cpuinfo", 16 * MIB).decode("ascii", "ignore").split())
    except OSError:
        return False
    # Mesa's code for 512 bits needs these parts of AVX-512.
    return {"avx512f", "avx512dq", "avx512bw", "avx512vl"} <= flags
