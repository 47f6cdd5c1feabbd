"""A checkpoint's manifest: the size and hash of each file, and what the folder belongs to.

``manifest.json`` is written last and includes its own hash. A folder with a damaged, foreign or
missing file is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qlora_wgpu.config.yaml import read_json_object
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.files import is_file, open_file

MANIFEST = "manifest.json"
_VERSION = 1
_HASH = "sha256"


def write_manifest(folder: Path, about: Mapping[str, Any]) -> None:
    """Writes the manifest of an unfinished folder; ``about`` says what it belongs to."""
    files = {path.name: _record(path) for path in sorted(folder.iterdir()) if is_file(path)}
    body = {"format_version": _VERSION, **about, "files": files}
    text = json.dumps({**body, _HASH: _hash_of(body)}, indent=1, allow_nan=False)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any]:
    """A folder's manifest, after every file has been compared with its hash."""
    path = folder / MANIFEST
    if not is_file(path):
        raise CheckpointError(
            f"{folder} has no {MANIFEST}: it was written by an older version, or is incomplete"
        )
    body = read_json_object(path)
    version = body.get("format_version")
    if isinstance(version, int) and version > _VERSION:
        raise CheckpointError(f"{path} was written by a newer version of qlora-wgpu: update it")
    if body.pop(_HASH, None) != _hash_of(body) or version != _VERSION:
        raise CheckpointError(f"{path} is damaged: its own hash does not match")
    for name, record in body["files"].items():
        _check(folder / Path(name).name, record)
    return body


def _hash_of(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _record(path: Path) -> dict[str, Any]:
    with open_file(path) as file:
        digest = hashlib.file_digest(file, _HASH).hexdigest()
        return {"size": file.tell(), _HASH: digest}


def _check(path: Path, record: Mapping[str, Any]) -> None:
    try:
        # Reading a pipe could block for ever, and a device may have no end.
        if not is_file(path):
            raise CheckpointError(f"{path} is missing")
        size = path.stat().st_size
        if size != record["size"]:
            raise CheckpointError(f"{path} is damaged: expected {record['size']} bytes, got {size}")
        if _record(path) != record:
            raise CheckpointError(f"{path} is damaged or was replaced: its hash does not match")
    except OSError as err:
        raise CheckpointError(f"{path} cannot be read: {err.strerror or err}") from err
