"""What a driver was found to compute, kept in the user's cache.

A statement of a shader that was checked once is sound for every run that is cut alike, so that one
with other settings checks only what is new in it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Set
from pathlib import Path
from typing import Any

from qlora_wgpu.cache_folder import cache_path, read_json
from qlora_wgpu.checkpoint.cache_file import write_cache_file
from qlora_wgpu.selfcheck.coverage import Statements

_SOUND, _WRONG = "sound", "wrong"
_CUTS = 32  # that are kept


def cache_file() -> Path:
    """The file of what is known of devices: ``qlora-wgpu/checked.json`` in the cache folder."""
    return cache_path("checked.json")


def unchecked(cut: str, needed: Statements) -> Statements:
    """What of a run's statements was not found sound yet.

    Args:
        cut: Tells a device, and how its kernels are cut, from others.
        needed: The run's statements.
    """
    sound = _strings(_read(_SOUND).get(cut))
    return frozenset(statement for statement in needed if _mark(statement) not in sound)


def keep_sound(cut: str, checked: Statements) -> None:
    """Remembers statements that are sound; arguments as for ``unchecked``."""
    sound = _read(_SOUND)
    marks = _strings(sound.pop(cut, None)) | {_mark(statement) for statement in checked}
    others = list(sound.items())[1 - _CUTS :]  # those that were added to last
    _write({_SOUND: {**dict(others), cut: sorted(marks)}, _WRONG: _read(_WRONG)})


def is_wrong(kind: str) -> bool:
    """Whether kernels of a kind were found to be computed wrongly."""
    return kind in _read(_WRONG)


def keep_wrong(kind: str) -> None:
    """Remembers that kernels of a kind are computed wrongly."""
    _write({_SOUND: _read(_SOUND), _WRONG: {**_read(_WRONG), kind: True}})


def key(parts: Iterable[object]) -> str:
    """A short name of all that."""
    return hashlib.sha256(json.dumps(list(parts)).encode()).hexdigest()[:16]


def _mark(statement: tuple[str, str]) -> str:
    return key(statement)


def _read(what: str) -> dict[str, Any]:
    known = read_json(cache_file())
    part = known.get(what) if isinstance(known, dict) else None
    return part if isinstance(part, dict) else {}


def _write(known: dict[str, Any]) -> None:
    # Where it cannot be kept, it is checked again next time.
    write_cache_file(cache_file(), json.dumps(known) + "\n")


def _strings(marks: object) -> Set[str]:
    return {mark for mark in marks if isinstance(mark, str)} if isinstance(marks, list) else set()
