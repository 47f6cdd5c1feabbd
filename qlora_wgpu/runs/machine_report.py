"""A report on a GPU that its user can send: properties, checks and step times.

It describes the GPU and its driver, not the user: paths and the names of the user and the machine
are removed from all strings of the driver and the system.
"""

from __future__ import annotations

import getpass
import math
import os
import platform
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from qlora_wgpu.bench.measure import Measurement, measure
from qlora_wgpu.bench.report import device_figures, to_json, versions
from qlora_wgpu.bench.workload import RandomFolder, Workload, find_shape
from qlora_wgpu.errors import OutOfMemoryError
from qlora_wgpu.gpu.adapters import FoundAdapter, installed_backends, list_adapters
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.memory import machine_bytes, memory_size, room
from qlora_wgpu.limits import MIB
from qlora_wgpu.selfcheck import Result, check_own_cases, num_own_cases

SECONDS = 280.0
"""Nothing is started after this time, so that a report takes at most five minutes."""
_FOR_CHECKS = 140.0  # of these, at most
_TO_PREPARE = 30.0  # until the first step of a model with 1B parameters
_SMALL, _LARGE = "S", "llama-3.2-1b"
_MAX_STEPS, _OTHER_RUNS = 5, 6  # measured steps; others to warm up and to time each kernel
_UTILIZATION = 0.15  # of a GPU's peak multiply-adds that a step reaches: a low estimate

Progress = Callable[[str], None]

# ---- properties ----------------------------------------------------------------------------------


def machine_facts(device: Device) -> dict[str, Any]:
    """Versions, the machine, all GPUs with their limits and features, and the one that is used."""
    backends = installed_backends()
    found = [gpu for backend in backends for gpu in list_adapters(backend.name)]
    return {
        "versions": versions(device) | {b.package: version(b.package) for b in backends},
        "machine": {
            "system": platform.system(),
            "release": without_names(platform.mac_ver()[0] or platform.release()),
            "processor": platform.machine(),
            "processors": os.cpu_count(),
            "memory": machine_bytes(),
        },
        "gpus": [_gpu(gpu) for gpu in found],
        "device": {
            **device_figures(device),
            "memory": memory_size(device),
            "notes": [without_names(note) for note in device.notes],
        },
    }


def _gpu(found: FoundAdapter) -> dict[str, Any]:
    raw = found.raw
    return {
        "backend": found.backend.name,
        "info": {
            key: without_paths(value) if isinstance(value, str) else value
            for key, value in raw.info.items()
        },
        "features": sorted(raw.features),
        "limits": dict(raw.limits),
        "matrix units": [str(shape) for shape in found.backend.matrix_shapes(raw)],
    }


_PATH = re.compile(r"(?:\b[A-Za-z]:)?(?:[\\/]+[^\s\\/:;,'\"()<>|]+){2,}[\\/]*")


def without_paths(text: str) -> str:
    """A string whose paths are replaced by an ellipsis, first those in the home folder."""
    for folder in (str(Path.home()), os.environ.get("HOME", ""), str(Path.cwd())):
        if len(folder) > 1:
            text = text.replace(folder, "…")
    return _PATH.sub("…", text)


def without_names(text: str) -> str:
    """A string without paths and without the names of the user and the machine."""
    variables = ("USER", "LOGNAME", "USERNAME", "COMPUTERNAME", "HOSTNAME")
    names = {os.environ.get(variable, "") for variable in variables}
    names |= {Path.home().name, socket.gethostname(), platform.node()}
    with suppress(OSError, KeyError, ImportError):  # no user with this id
        names.add(getpass.getuser())
    names |= {name.partition(".")[0] for name in names}
    text = without_paths(text)
    for name in sorted(names - {""}, key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "…", text, flags=re.IGNORECASE)
    return text


# ---- measurements --------------------------------------------------------------------------------


class _TimeIsUp(Exception):
    """Raised from a progress callback when a measurement takes too long."""


def machine_report(
    device: Device, progress: Progress = lambda text: None, seconds: float = SECONDS
) -> Iterator[dict[str, Any]]:
    """Yields the growing report after each part, since a driver may crash the process.

    Its ``unfinished`` names the part that comes next. Steps of a model with 1B parameters are
    skipped, with the reason, if memory or time do not suffice.
    """
    began = time.monotonic()

    def left() -> float:
        return began + seconds - time.monotonic()

    def bounded(text: str) -> None:
        if left() < 0:
            raise _TimeIsUp
        progress(text)

    report: dict[str, Any] = {"report": 1, **machine_facts(device), "unfinished": "checks"}
    yield report
    report["checks"] = _checks(device, progress, began + min(_FOR_CHECKS, seconds / 2))
    report |= {"steps": {}, "unfinished": f"steps of {_SMALL}"}
    yield report
    small, report["steps"][_SMALL] = _measured(Workload(find_shape(_SMALL)), device, bounded)
    report["unfinished"] = f"steps of {_LARGE}"
    yield report
    report["steps"][_LARGE] = _large_steps(device, small, bounded, left)
    del report["unfinished"]
    report["seconds"] = time.monotonic() - began
    yield report


def _checks(device: Device, progress: Progress, until: float) -> dict[str, Any]:
    """The results of as many checks as time allows, a row for each kernel and type."""
    rows: dict[tuple[str, str], list[Result]] = {}
    total, done, failed = num_own_cases(device), 0, {}
    results = check_own_cases(device)
    try:
        while time.monotonic() < until and (result := next(results, None)) is not None:
            rows.setdefault((result.check, result.dtype), []).append(result)
            done += 1
            progress(f"checking the driver {done}/{total}")
    except Exception as err:  # a lost device, or whatever else a driver raises
        failed = {"failed": without_names(f"{type(err).__name__}: {err}")}
    table = [_check_row(name, dtype, own) for (name, dtype), own in rows.items()]
    wrong = sum(row["wrong"] for row in table)
    return {"total": total, "done": done, "wrong": wrong, **failed, "results": table}


def _check_row(name: str, dtype: str, results: list[Result]) -> dict[str, Any]:
    refusals = [without_names(each.refusal) for each in results if each.refusal]
    return {
        "check": name,
        "dtype": dtype,
        "cases": len(results),
        "wrong": sum(not each.good for each in results),
        "error": _finite(max(each.error for each in results)),
        "excess": _finite(max(each.excess for each in results)),
        **({"refusal": refusals[0]} if refusals else {}),
    }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _measured(
    workload: Workload, device: Device, progress: Progress
) -> tuple[Measurement | None, dict[str, Any]]:
    """A shape's step times, and their entry in the report, which may be an error."""
    name = workload.shape.name
    try:
        measurement = measure(workload, device, lambda text: progress(f"{name}: {text}"))
    except _TimeIsUp:
        return None, {"skipped": "it took longer than the time available"}
    except Exception as err:  # the report is about whatever a driver raises
        return None, {"failed": without_names(f"{type(err).__name__}: {err}")}
    figures = to_json(measurement)
    return measurement, {key: figures[key] for key in figures if key not in ("versions", "device")}


def _large_steps(
    device: Device, small: Measurement | None, progress: Progress, left: Callable[[], float]
) -> dict[str, Any]:
    """The step times of 1B parameters, or why they were skipped; fewer steps on a slow GPU."""
    if small is None:
        return {"skipped": f"{_SMALL} was not measured"}
    workload = Workload(find_shape(_LARGE))
    if reason := _no_room(workload, device):
        return {"skipped": reason}
    step = _likely_seconds(workload, small)
    count = min(int((left() - _TO_PREPARE) / step) - _OTHER_RUNS, _MAX_STEPS)
    if count < 1:
        return {"skipped": f"a step may take {step:,.0f} s, longer than the time left"}
    return _measured(replace(workload, steps=count), device, progress)[1]


def _no_room(workload: Workload, device: Device) -> str:
    """Why a shape does not fit into the device's memory; empty if it does."""
    try:
        needed = sum(workload.planned_memory(device).values())
    except OutOfMemoryError as err:
        return without_names(str(err))
    free = room(device)
    if free is None or needed <= free:
        return ""
    return f"it needs {needed / MIB:,.0f} MiB, but the GPU has {free / MIB:,.0f} MiB available"


def _likely_seconds(workload: Workload, small: Measurement) -> float:
    """An upper estimate of the time of a step, from that of a smaller shape."""
    sizes = []
    for each in (workload, small.workload):
        assert isinstance(each.shape.folder, RandomFolder)
        sizes.append(each.shape.folder.num_parameters)
    reached = small.flops_per_step / small.steps.step_seconds.median
    rate = max(reached, _UTILIZATION * small.ceilings.flops_per_second)
    return small.flops_per_step * sizes[0] / sizes[1] / rate
