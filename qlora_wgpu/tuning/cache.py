"""The profiles that tuners chose, in one JSON file, so that each GPU and shape is timed once."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from qlora_wgpu.cache_folder import cache_path, make_cache_folder
from qlora_wgpu.files import file_text
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.identity import identity
from qlora_wgpu.gpu.profile import Profile
from qlora_wgpu.limits import OWN_JSON_BYTES
from qlora_wgpu.tuning.tuner import Choice, Task, tune

_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
          "head_dim", "vocab_size")  # fmt: skip


def cache_file() -> Path:
    """The file of choices: ``qlora-wgpu/tuning.json`` in the user's cache folder."""
    return cache_path("tuning.json")


def tuned(
    device: Device,
    task: Task,
    open_device: Callable[[], Device],
    progress: Callable[[str], None] = lambda text: None,
) -> Choice:
    """Gives a device the profile that was, or now is, found to be the fastest for a task.

    Args:
        device: The device, whose profile is set.
        task: The training to time kernels for.
        open_device: Opens the same GPU once more, to try things on.
        progress: Called with what is going on.

    Raises:
        OutOfMemoryError: If the device has no room for one layer.
        DeviceError: If it refuses something else.
    """
    key = key_of(device, task)
    entries = _read()
    if key not in entries:
        choice = tune(open_device(), task, progress)
        entries[key] = {
            "device": device.name,
            "driver": device.gpu.info["description"],
            "shape": {name: task.config.get(name) for name in _SIZES},
            "batch": task.batch,
            "seq": task.seq,
            "profile": asdict(choice.profile),
            "notes": list(choice.notes),
        }
        _write(entries)
    entry = entries[key]
    profile = _profile(entry.get("profile"), device.profile)
    device.profile = profile
    return Choice(profile, tuple(str(note) for note in entry.get("notes", ())))


def choices_for(device: Device) -> list[dict[str, Any]]:
    """All that is known of a GPU and its driver."""
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
        "model": [task.config.get("model_type"), *(task.config.get(name) for name in _SIZES)],
        "task": [task.batch, task.seq, task.lora.r, task.quant.scheme, task.compute_dtype],
        "subgroup_size": device.profile.subgroup_size,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _profile(stored: Any, default: Profile) -> Profile:
    """A stored profile; what it lacks or does not fit is taken from the default."""
    if not isinstance(stored, dict):
        return default
    names = {field.name for field in fields(Profile)}
    changes: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in stored.items()
        if name in names
    }
    return replace(default, **changes)


def _read() -> dict[str, dict[str, Any]]:
    try:
        entries = json.loads(file_text(cache_file(), OWN_JSON_BYTES))
    except (OSError, ValueError):
        return {}  # nothing, or nothing usable: it is made anew
    return (
        {k: v for k, v in entries.items() if isinstance(v, dict)}
        if isinstance(entries, dict)
        else {}
    )


def _write(entries: dict[str, dict[str, Any]]) -> None:
    path = cache_file()
    try:
        make_cache_folder(path.parent)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError:
        pass  # a cache that cannot be written costs time only
