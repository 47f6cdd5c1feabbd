"""The profiles that tuners chose, in one JSON file, so that each GPU and shape is timed once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from qlora_wgpu.cache_folder import cache_path, read_json
from qlora_wgpu.checkpoint.atomic import write_cache_file
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.identity import identity
from qlora_wgpu.gpu.kernel_config import Profile
from qlora_wgpu.tuning.tuner import Choice, Task, tune

_METHOD = 2  # one more where choices that were made before are not to be trusted


def cache_file() -> Path:
    """The file of choices: ``qlora-wgpu/tuning.json`` in the user's cache folder."""
    return cache_path("tuning.json")


def tuned(
    device: Device,
    task: Task,
    open_device: Callable[[], Device],
    progress: Callable[[str], None] = lambda text: None,
) -> Choice:
    """Gives a device the profile that was, or now is, found to be the fastest for a task."""
    key = key_of(device, task)
    entries = _read()
    problem = ""
    if key not in entries:
        choice = tune(open_device(), task, progress)
        entry = {
            "device": device.name,
            "driver": device.gpu.info["description"],
            "shape": task.sizes,
            "batch": task.batch,
            "seq": task.seq,
            "profile": asdict(choice.profile),
            "notes": list(choice.notes),
        }
        entries[key] = {**entry, "sha256": _digest(entry)}
        problem = write_cache_file(cache_file(), json.dumps(entries, indent=1) + "\n")
    entry = entries[key]
    profile = _profile(entry.get("profile"), device.profile)
    device.profile = profile
    notes = [str(note) for note in entry.get("notes", ())]
    return Choice(
        profile, (*notes, *([f"not kept for the next run: {problem}"] if problem else []))
    )


def choices_for(device: Device) -> list[dict[str, Any]]:
    """All choices for a GPU and its driver."""
    driver = device.gpu.info["description"]
    return [
        entry
        for entry in _read().values()
        if entry.get("device") == device.name and entry.get("driver") == driver
    ]


def known_keys() -> set[str]:
    """The tasks that have been timed."""
    return set(_read())


def key_of(device: Device, task: Task) -> str:
    """Names a GPU, its driver, this version and its shaders, and a task."""
    parts = {
        "device": identity(device),
        "model": [task.config.get("model_type"), *task.sizes.values()],
        "task": [task.batch, task.seq, task.lora.r, task.quant.scheme, task.compute_dtype],
        "subgroup_size": device.profile.subgroup_size,
        "method": _METHOD,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _profile(stored: Any, default: Profile) -> Profile:
    """A stored profile; what it lacks or does not fit is taken from the default."""
    if not isinstance(stored, dict):
        return default
    names = {field.name for field in fields(Profile)} - {"limits"}
    changes = {name: _tuples(value) for name, value in stored.items() if name in names}
    return replace(default, **changes)


def _tuples(value: Any) -> Any:
    """JSON's lists as the tuples that they were."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _read() -> dict[str, dict[str, Any]]:
    entries = read_json(cache_file())
    if not isinstance(entries, dict):
        return {}  # nothing, or nothing usable: it is made anew
    return {key: entry for key, entry in entries.items() if _is_whole(entry)}


def _is_whole(entry: Any) -> bool:
    """Whether an entry is as it was written: nothing else of it is looked at."""
    if not isinstance(entry, dict):
        return False
    rest = {name: value for name, value in entry.items() if name != "sha256"}
    return entry.get("sha256") == _digest(rest)


def _digest(entry: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()
