"""Caches tuned profiles in a JSON file, so that each GPU and shape is timed once."""

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

_METHOD = 2  # increased to invalidate earlier choices


def cache_file() -> Path:
    """``qlora-wgpu/tuning.json`` in the user's cache folder."""
    return cache_path("tuning.json")


def tuned(
    device: Device,
    task: Task,
    open_device: Callable[[], Device],
    progress: Callable[[str], None] = lambda text: None,
) -> Choice:
    """Sets a device's profile to the fastest one for a task, cached or timed now."""
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
        profile, (*notes, *([f"not cached for the next run: {problem}"] if problem else []))
    )


def choices_for(device: Device) -> list[dict[str, Any]]:
    """All cached choices for a GPU and its driver."""
    driver = device.gpu.info["description"]
    return [
        entry
        for entry in _read().values()
        if entry.get("device") == device.name and entry.get("driver") == driver
    ]


def known_keys() -> set[str]:
    """Keys of the tasks that have been timed."""
    return set(_read())


def key_of(device: Device, task: Task) -> str:
    """A hash of GPU, driver, package version, shaders and task."""
    parts = {
        "device": identity(device),
        "model": [task.config.get("model_type"), *task.sizes.values()],
        "task": [task.batch, task.seq, task.lora.r, task.quant.scheme, task.compute_dtype],
        "subgroup_size": device.profile.subgroup_size,
        "method": _METHOD,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _profile(stored: Any, default: Profile) -> Profile:
    """Reads a stored profile; missing or unknown fields are the default's."""
    if not isinstance(stored, dict):
        return default
    names = {field.name for field in fields(Profile)} - {"limits"}
    changes = {name: _tuples(value) for name, value in stored.items() if name in names}
    return replace(default, **changes)


def _tuples(value: Any) -> Any:
    """Converts lists of JSON back to tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _read() -> dict[str, dict[str, Any]]:
    entries = read_json(cache_file())
    if not isinstance(entries, dict):
        return {}  # missing or unusable: it is written again
    return {key: entry for key, entry in entries.items() if _is_whole(entry)}


def _is_whole(entry: Any) -> bool:
    if not isinstance(entry, dict):
        return False
    rest = {name: value for name, value in entry.items() if name != "sha256"}
    return entry.get("sha256") == _digest(rest)


def _digest(entry: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()
