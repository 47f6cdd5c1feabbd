"""Settings of Mesa's software GPU, lavapipe, which it reads when its driver is loaded."""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping

from qlora_wgpu.cache_folder import cache_path, make_cache_folder
from qlora_wgpu.errors import DeviceError
from qlora_wgpu.files import file_bytes
from qlora_wgpu.limits import MIB

_THREADS_PER_PROCESSOR = 2  # with more, waking them takes longer than they gain
_MOST_THREADS = 16  # that Mesa takes
_WIDTH = "LP_NATIVE_VECTOR_WIDTH"
_WIDTHS = (128, 256, 512)  # bits: Mesa 22 and 26 crash or hang with any other
_FAMILY = re.compile(r"^cpu family\s*:\s*(\d+)$", re.MULTILINE)
_ZEN_5 = 26  # the first family of AMD's that computes 512 bits in one turn
_LANES_OF_256_BITS, _LANES_OF_512_BITS = 8, 16


def add_software_threads(environ: MutableMapping[str, str]) -> None:
    """Lets Mesa's software GPU use two threads per processor.

    It gives each thread an equal share of a launch beforehand and then waits for the last one: with
    a thread per processor, one that has to wait for its processor holds up the launch. Smaller
    shares even that out. What the user has set stays. It must be called before the driver
    is loaded.
    """
    threads = min(_THREADS_PER_PROCESSOR * _processors(), _MOST_THREADS)
    environ.setdefault("LP_NUM_THREADS", str(threads))


def widen_software_vectors(environ: MutableMapping[str, str]) -> None:
    """Lets Mesa's software GPU use 512-bit vectors where the processor gains by them.

    On AMD's it doubles what lavapipe computes, which keeps to 256 bits by itself. On Intel's
    (Sapphire Rapids) products gain a fifth and all that rather moves than computes loses half, so
    that a step is slower. Mesa's shader cache does not tell the widths apart, so that one which it
    does not choose itself, be it the user's, gets a folder of its own. What the user has set stays.
    It must be called before the driver is loaded.

    Raises:
        DeviceError: If the user has set a width with which the driver ends the process.
    """
    if _WIDTH not in environ:
        if not _gains_by_512_bits():
            return
        environ[_WIDTH] = "512"
    _check_width(environ[_WIDTH])
    if not {"MESA_SHADER_CACHE_DIR", "MESA_SHADER_CACHE_DISABLE"} & environ.keys():
        folder = cache_path(f"mesa-{environ[_WIDTH]}")
        try:
            make_cache_folder(folder)  # Mesa makes the last folder only
        except OSError:
            environ["MESA_SHADER_CACHE_DISABLE"] = "true"  # else it complains on stderr
        else:
            environ["MESA_SHADER_CACHE_DIR"] = str(folder)


def _check_width(text: str) -> None:
    try:
        width = int(text, 0)  # as Mesa reads it
    except ValueError:
        return  # which Mesa passes over
    if width not in _WIDTHS:
        raise DeviceError(
            f"{_WIDTH} is {text}, and Mesa's software GPU ends the process with vectors of other "
            f"than {', '.join(map(str, _WIDTHS[:-1]))} or {_WIDTHS[-1]} bits: unset it, or set "
            "one of these"
        )


def rows_of_products(subgroup_size: int) -> int:
    """How many rows of results an invocation of a product should hold on this processor.

    More rows load less, but make a longer loop, and AMD's processors wait for instructions beyond
    those that their caches hold. Up to family 25 (Zen 4), with 256 bits, that is 4,096 decoded
    ones at best (``wants_short_loops``), where the loop over 16 rows has 3,500 and is too long,
    over 10 rows 2,500; family 26 (Zen 5) computes all 512 bits in one turn, and of the 55 KB of 32
    rows 32 KB are held, of 16 rows all 30.

    Args:
        subgroup_size: Invocations of a subgroup.
    """
    if wants_short_loops(subgroup_size):
        return 10
    waits = subgroup_size == _LANES_OF_512_BITS and _family_of_amd() >= _ZEN_5
    return 16 if waits else 32


def wants_short_loops(subgroup_size: int) -> bool:
    """Whether loops should have 2,500 instructions at most on this processor.

    AMD's up to family 25, with 256 bits, keep 4,096 decoded instructions at best and decode what
    lies beyond anew in every turn.

    Args:
        subgroup_size: Invocations of a subgroup.
    """
    return _is_before_zen_5(subgroup_size)


def wants_textures(subgroup_size: int) -> bool:
    """Whether all that kernels read should lie in textures on this processor, where it may.

    Mesa reads a buffer word by word, and puts each into a vector on the stack, of which it then
    takes the whole: AMD's processors up to family 25, with 256 bits, wait for every one of these
    until the word has left for the cache, 25 ns for 16 bytes where a texture takes 3.

    Args:
        subgroup_size: Invocations of a subgroup.
    """
    return _is_before_zen_5(subgroup_size)


def _is_before_zen_5(subgroup_size: int) -> bool:
    return subgroup_size == _LANES_OF_256_BITS and 0 < _family_of_amd() < _ZEN_5


def _family_of_amd() -> int:
    """The family of an AMD processor; 0 of any other, or if none is told."""
    cpu = _cpu()
    return max(map(int, _FAMILY.findall(cpu)), default=0) if "AuthenticAMD" in cpu else 0


def _processors() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _gains_by_512_bits() -> bool:
    # Mesa's code for 512 bits needs these parts of AVX-512.
    needed = {"AuthenticAMD", "avx512f", "avx512dq", "avx512bw", "avx512vl"}
    return needed <= set(_cpu().split())


def _cpu() -> str:
    """What Linux tells of the processors."""
    try:
        return file_bytes("/proc/cpuinfo", 16 * MIB).decode("ascii", "ignore")
    except OSError:
        return ""
