"""All checks of a device, remembered by GPU, driver, version and shaders."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from qlora_wgpu.cache_folder import cache_path, read_json
from qlora_wgpu.checkpoint.cache_file import write_cache_file
from qlora_wgpu.errors import DeviceError, OutOfMemoryError
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.identity import identity
from qlora_wgpu.gpu.profile import CPU_PROFILE, GPU_PROFILE, Profile
from qlora_wgpu.selfcheck.cases import checks
from qlora_wgpu.selfcheck.runner import Runner

# Sums of float32 in any order, and one rounding of operands to bfloat16 on the way.
BOUNDS = {"float32": 2e-5, "bfloat16": 1.2e-2}


@dataclass(frozen=True)
class Result:
    """One check of one variant.

    Attributes:
        check: A key of ``checks()``.
        variant: How its kernels were cut.
        dtype: Element type of operands.
        error: The largest, relative to the largest value; infinite where something is no number.
        refusal: The driver's error instead of a result, if there was one.
        shaders: The files that ran.
    """

    check: str
    variant: str
    dtype: str
    error: float
    refusal: str = ""
    shaders: frozenset[str] = frozenset()

    @property
    def good(self) -> bool:
        """Whether the driver computed it, and near enough."""
        return not self.refusal and self.error <= BOUNDS[self.dtype]


def variants(device: Device) -> dict[str, Profile]:
    """Every way of cutting kernels that a device may run, its own first."""
    profiles = {"own": device.profile}
    if device.profile.textures:
        profiles["buffers"] = CPU_PROFILE
    else:
        profiles["registers"] = replace(device.profile, gemm_kind="register")
        profiles["workgroup memory"] = replace(device.profile, gemm_kind="tiled")
    if device.is_cpu:
        profiles["as on GPUs"] = GPU_PROFILE
        profiles["as on GPUs, workgroup memory"] = replace(GPU_PROFILE, gemm_kind="tiled")
    return profiles


def check_device(device: Device, *, short: bool = False) -> Iterator[Result]:
    """Runs all checks; with ``short`` those of the device's own kernels in bfloat16 alone."""
    for variant, profile in variants(device).items():
        for dtype in BOUNDS:
            if short and (variant, dtype) != ("own", "bfloat16"):
                continue
            for name, check in checks().items():
                yield _result(device, name, check, variant, profile, dtype)


def ensure_sound(
    device: Device,
    open_device: Callable[[], Device],
    progress: Callable[[str], None] = lambda text: None,
) -> None:
    """Runs the short form once per GPU, driver, version and shaders.

    Args:
        device: The device that is to be used.
        open_device: Opens the same GPU once more, so that nothing of the check stays on it.
        progress: Called with what is going on.

    Raises:
        DeviceError: If the driver computes wrongly; it is not remembered then.
    """
    key = identity(device)
    passed = _read()
    if key in passed:
        return
    progress("checking that the driver computes rightly, once")
    wrong = [result for result in check_device(open_device(), short=True) if not result.good]
    if wrong:
        first = wrong[0]
        what = first.refusal or f"{first.error:.1e} away from what it should be"
        raise DeviceError(
            f"{device.name} ({device.gpu.info['description'] or 'driver not told'}) does not "
            f"compute rightly: {first.check} is {what} ({len(wrong)} of {len(checks())} checks "
            "fail); "
            "update the driver, choose another GPU (device.gpu) or backend "
            "(device.backend), and see `qlora-wgpu doctor --check`"
        )
    # Where it cannot be kept, it is checked again next time.
    write_cache_file(cache_file(), json.dumps([*passed, key]) + "\n")


def _result(
    device: Device,
    name: str,
    check: Callable[[Runner], None],
    variant: str,
    profile: Profile,
    dtype: str,
) -> Result:
    run = Runner(device, profile, dtype)
    try:
        check(run)
    except OutOfMemoryError:
        raise
    except Exception as err:  # whatever a driver's compiler or its validation raises
        return Result(name, variant, dtype, float("inf"), _reason(err))
    return Result(name, variant, dtype, run.worst, shaders=frozenset(run.shaders))


def _reason(err: Exception) -> str:
    """The line of an implementation's message that says what is wrong."""
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    if not lines:
        return type(err).__name__
    # A compiler's is marked; of other messages wgpu's ends with it, and Dawn's begins with it.
    last = lines[0] if lines[-1].startswith("- While") else lines[-1]
    return next((line for line in lines if "error: " in line), last)


def cache_file() -> Path:
    """The file of devices that are sound: ``qlora-wgpu/checked.json`` in the cache folder."""
    return cache_path("checked.json")


def _read() -> list[str]:
    keys = read_json(cache_file())
    return [key for key in keys if isinstance(key, str)] if isinstance(keys, list) else []
