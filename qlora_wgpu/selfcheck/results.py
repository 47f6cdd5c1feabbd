"""Runs a device's checks, all or those that a training run needs, and caches the results.

A shader statement that passed once is verified for all runs with the same profile, so a run with
other settings only checks new statements.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby, product, zip_longest
from pathlib import Path
from typing import Any

from qlora_wgpu.cache_folder import cache_path, read_json
from qlora_wgpu.checkpoint.atomic import write_cache_file
from qlora_wgpu.errors import DeviceError, DeviceLostError, OutOfMemoryError
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.driver import guarded_probe, has_crashed, under_way
from qlora_wgpu.gpu.identity import identity
from qlora_wgpu.gpu.kernel_config import CPU_PROFILE, GPU_PROFILE, Profile, plainer
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.launch import Launch
from qlora_wgpu.selfcheck.cases import Case, cases_for, checks
from qlora_wgpu.selfcheck.coverage import Footprint, Statements, covering
from qlora_wgpu.selfcheck.runner import Runner, Tracer, TracingDone

# ---- the cache -------------------------------------------------------------------------------

_SOUND, _WRONG = "sound", "wrong"
_CUTS = 32  # number of profiles in the cache


def cache_file() -> Path:
    return cache_path("checked.json")


def unchecked(cut: str, needed: Statements) -> Statements:
    """The statements of a run that are not verified yet."""
    sound = _strings(_read(_SOUND).get(cut))
    return frozenset(statement for statement in needed if key(statement) not in sound)


def keep_sound(cut: str, checked: Statements) -> None:
    """Stores verified statements; arguments as for ``unchecked``."""
    sound = _read(_SOUND)
    marks = _strings(sound.pop(cut, None)) | {key(statement) for statement in checked}
    others = list(sound.items())[1 - _CUTS :]  # the most recently used ones
    _write({_SOUND: {**dict(others), cut: sorted(marks)}, _WRONG: _read(_WRONG)})


def is_wrong(kind: str) -> bool:
    """Whether kernels of a kind are known to give wrong results."""
    return kind in _read(_WRONG)


def keep_wrong(kind: str) -> None:
    """Stores that kernels of a kind give wrong results."""
    _write({_SOUND: _read(_SOUND), _WRONG: {**_read(_WRONG), kind: True}})


def key(parts: Iterable[object]) -> str:
    return hashlib.sha256(json.dumps(list(parts)).encode()).hexdigest()[:16]


def _read(what: str) -> dict[str, Any]:
    known = read_json(cache_file())
    part = known.get(what) if isinstance(known, dict) else None
    return part if isinstance(part, dict) else {}


def _write(known: dict[str, Any]) -> None:
    # If it cannot be stored, it is checked again next time.
    write_cache_file(cache_file(), json.dumps(known) + "\n")


def _strings(marks: object) -> Set[str]:
    return {mark for mark in marks if isinstance(mark, str)} if isinstance(marks, list) else set()


# ---- checks ----------------------------------------------------------------------------------

DTYPES = ("float32", "bfloat16")
_VERIFYING = "Verifying the GPU driver (first run only)"


@dataclass(frozen=True)
class Result:
    """One check of one variant."""

    check: str  # a key of ``checks()``
    variant: str  # the profile of its kernels
    dtype: str  # element type of operands
    error: float  # the maximum error relative to the largest value; infinite for NaN
    excess: float  # the maximum error as a multiple of the tolerance
    refusal: str = ""  # the driver's error instead of a result, if any
    shaders: frozenset[str] = frozenset()  # the files that ran

    @property
    def good(self) -> bool:
        """Whether the driver computed it within the tolerance."""
        return not self.refusal and self.excess <= 1.0


def variants(device: Device) -> dict[str, Profile]:
    """All profiles that a device can run, its own first."""
    profiles = {"own": device.profile}
    if device.profile.textures:
        profiles["buffers"] = CPU_PROFILE
    else:
        profiles["registers"] = _of_kind(device.profile, "register")
        profiles["workgroup memory"] = _of_kind(device.profile, "tiled")
    if device.is_cpu:
        profiles["as on GPUs"] = GPU_PROFILE
        profiles["as on GPUs, registers"] = _of_kind(GPU_PROFILE, "register")
    return profiles


def _of_kind(profile: Profile, kind: str) -> Profile:
    return replace(profile, gemm_kind=kind, attention_kind=kind)


def num_checks(device: Device) -> int:
    return len(variants(device)) * len(DTYPES) * len(checks())


def check_device(device: Device) -> Iterator[Result]:
    for variant in variants(device):
        for dtype in DTYPES:
            yield from check_variant(device, variant, dtype)


def check_variant(device: Device, variant: str, dtype: str) -> Iterator[Result]:
    profile = variants(device)[variant]
    cases = cases_of(device, profile, dtype)
    for name in checks():
        own = [case for case in cases if case.check == name]
        yield _result(device, own, variant, profile, dtype)


def num_own_cases(device: Device) -> int:
    return len(DTYPES) * len(cases_for(device.profile))


def check_own_cases(device: Device) -> Iterator[Result]:
    """Runs the cases of the device's own kernels one by one, so that callers can stop any time.

    All checks' first cases come before any second one.
    """
    by_check = groupby(cases_for(device.profile), key=lambda case: case.check)
    for cases in zip_longest(*(list(own) for _, own in by_check)):
        for case, dtype in product(filter(None, cases), DTYPES):
            yield _result(device, [case], "own", device.profile, dtype)


def check_launches(
    device: Device,
    graph: Graph,
    launches: Iterable[Launch],
    new: Statements | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[Result]:
    """Runs checks that execute all statements of a run's launches.

    Args:
        device: The device to check.
        graph: A graph of the run, for its element type and profile.
        launches: All launches of the run.
        new: The statements to check; all of them by default.
        progress: Called with the number of each check and their total.
    """
    progress(_VERIFYING)  # choosing the checks takes a while
    cases = cases_of_launches(device, graph.profile, graph.dtype, launches, new)
    for number, case in enumerate(cases, 1):
        progress(f"{_VERIFYING} {number}/{len(cases)}")
        yield _result(device, [case], "own", graph.profile, graph.dtype)


def cases_of_launches(
    device: Device,
    profile: Profile,
    dtype: str,
    launches: Iterable[Launch],
    new: Statements | None = None,
) -> list[Case]:
    needed = Footprint.of(launches)
    missing = needed.statements if new is None else new
    paths = {path for path, _ in missing}
    cases, chosen, tried = cases_for(profile), list[Case](), set[Case]()
    # First those in buffers that launch the same files; few runs need others.
    for in_textures, only in ((False, paths), (True, paths), (None, None)):
        others = [c for c in cases if c not in tried and in_textures in (c.in_textures, None)]
        if missing and others:
            traced = _traced(device, profile, dtype, others, only)
            more, missing = covering(missing, traced, needed.shaders)
            chosen += more
            tried |= traced.keys()
    return chosen


def cases_of(device: Device, profile: Profile, dtype: str) -> list[Case]:
    """All checks in buffers, and those in textures that execute other statements."""
    if not profile.textures:
        return cases_for(profile)  # tracing all of them is slow and adds none
    traced = _traced(device, profile, dtype)
    chosen = [case for case in traced if not case.in_textures]
    missing = _executed(traced.values()) - _executed(traced[case] for case in chosen)
    return chosen + covering(missing, traced)[0]


def _executed(parts: Iterable[Footprint]) -> Statements:
    return frozenset[tuple[str, str]]().union(*(part.statements for part in parts))


def _traced(
    device: Device,
    profile: Profile,
    dtype: str,
    cases: Iterable[Case] | None = None,
    paths: Set[str] | None = None,
) -> dict[Case, Footprint]:
    """The footprints of checks, all by default.

    If a check's first case launches none of the shaders in ``paths``, its others are skipped.
    """
    traced: dict[Case, Footprint] = {}
    for _, own in groupby(cases or cases_for(profile), key=lambda case: case.check):
        for number, case in enumerate(own):
            run = Tracer(device, profile, dtype, in_textures=case.in_textures)
            with suppress(TracingDone):
                case.function(run, *case.arguments)
            traced[case] = Footprint.of(run.launches)
            if number == 0 and paths is not None and not traced[case].paths & paths:
                break
    return traced


def ensure_sound(
    device: Device,
    open_device: Callable[[], Device],
    graph: Graph,
    launches: Iterable[Launch],
    progress: Callable[[str], None] = lambda text: None,
) -> None:
    """Checks a run's kernels, each shader statement once per GPU, driver and version."""
    problem = problem_of(device, open_device, graph, launches, progress)
    if problem:
        raise unsound(problem)


def unsound(problem: str) -> DeviceError:
    """The error for a driver with wrong results, from the message of ``problem_of``."""
    return DeviceError(
        f"{problem}; update the driver, choose another GPU (device.gpu) or backend "
        "(device.backend), and see `qlora-wgpu doctor --check`"
    )


def problem_of(
    device: Device,
    open_device: Callable[[], Device],
    graph: Graph,
    launches: Iterable[Launch],
    progress: Callable[[str], None] = lambda text: None,
) -> str:
    """A message on wrong results of a run's kernels; empty if there are none.

    Arguments are those of ``ensure_sound``.
    """
    launches = list(launches)
    cut = key([identity(device), repr(graph.profile), graph.dtype])
    new = unchecked(cut, Footprint.of(launches).statements)
    if not new:
        return ""
    with guarded_probe(_crash_kind(device), f"checking {device.name}"):
        results = list(check_launches(open_device(), graph, launches, new, progress))
    wrong = [result for result in results if not result.good]
    if wrong:
        first = wrong[0]
        what = first.refusal or f"its error is {first.error:.1e}"
        return (
            f"{device.name} ({device.gpu.info['description'] or 'unknown driver'}) gives wrong "
            f"results: {first.check} failed: {what} ({len(wrong)} of {len(results)} checks failed)"
        )
    keep_sound(cut, new)
    return ""


def give_way(device: Device) -> Profile | None:
    """Switches a device with wrong results to plainer kernels, and remembers this for its driver.

    Returns the new profile; None if there is no plainer one.
    """
    profile = plainer(device.profile)
    if profile is not None:
        keep_wrong(_wrong_kind(device))
        device.profile = profile
    return profile


def avoid_what_is_wrong(device: Device) -> None:
    """Switches a device to kernels without known errors with this driver."""
    while (wrong := is_wrong(_wrong_kind(device))) or has_crashed(_crash_kind(device)):
        profile = plainer(device.profile)
        if profile is None:
            return
        device.notes += (
            f"{device.name} {'gave wrong results' if wrong else 'crashed'} before with this "
            f"driver: using {_kinds(profile)} instead of {_kinds(device.profile)}",
        )
        device.profile = profile


def _wrong_kind(device: Device) -> str:
    return f"{_kinds(device.profile)} {identity(device)}"


def _crash_kind(device: Device) -> str:
    return f"checks of {_wrong_kind(device)}"


def _kinds(profile: Profile) -> str:
    return f"{profile.gemm_kind!r} products and {profile.attention_kind!r} attention"


def _result(
    device: Device, cases: list[Case], variant: str, profile: Profile, dtype: str
) -> Result:
    name, error, excess = cases[0].check, 0.0, 0.0
    shaders: set[str] = set()
    for case in cases:
        run = Runner(device, profile, dtype, in_textures=case.in_textures)
        try:
            with under_way(f"checking {name}, {variant}, {dtype}"):
                case.function(run, *case.arguments)
        except (OutOfMemoryError, DeviceLostError):
            raise
        except Exception as err:  # any error of a driver's compiler or validation
            return Result(name, variant, dtype, float("inf"), float("inf"), _reason(err))
        error, excess = max(error, run.worst), max(excess, run.excess)
        shaders |= run.shaders
    return Result(name, variant, dtype, error, excess, shaders=frozenset(shaders))


def _reason(err: Exception) -> str:
    """The line of an implementation's message with the actual error."""
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    if not lines:
        return type(err).__name__
    # A compiler's error is marked; otherwise it is the end of wgpu's message, the start of Dawn's.
    last = lines[0] if lines[-1].startswith("- While") else lines[-1]
    return next((line for line in lines if "error: " in line), last)
