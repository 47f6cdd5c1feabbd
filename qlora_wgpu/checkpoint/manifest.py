"""A folder that knows what it is: each file's size and hash, and what the whole belongs to.

``manifest.json`` is written last. It hashes itself, too, so that a folder is either what was
written, byte for byte, or is refused: a damaged file, one of another folder, one that is missing.
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
    """Lists the files that an unfinished folder holds, and says what they belong to."""
    files = {path.name: _record(path) for path in sorted(folder.iterdir()) if is_file(path)}
    body = {"format_version": _VERSION, **about, "files": files}
    text = json.dumps({**body, _HASH: _hash_of(body)}, indent=1, allow_nan=False)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a folder's files belong to; every one of them has been compared with its hash."""
    path = folder / MANIFEST
    if not is_file(path):
        raise CheckpointError(
            f"{folder} has no {MANIFEST}, so nothing says whether it is whole: an older version "
            "wrote it, or it has lost files"
        )
    body = read_json_object(path)
    version = body.get("format_version")
    if isinstance(version, int) and version > _VERSION:
        raise CheckpointError(f"{path} is of a newer version of qlora-wgpu: update it")
    if body.pop(_HASH, None) != _hash_of(body) or version != _VERSION:
        raise CheckpointError(f"{path} is damaged: its own hash is another one")
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
        # A pipe would block for ever, and a device would never end.
        if not is_file(path):
            raise CheckpointError(f"{path} is missing")
        size = path.stat().st_size
        if size != record["size"]:
            raise CheckpointError(f"{path} is damaged: it has {size} bytes, not {record['size']}")
        if _record(path) != record:
            raise CheckpointError(f"{path} is damaged, or of another time: its hash is another one")
    except OSError as err:
        raise CheckpointError(f"{path} cannot be read: {err.strerror or err}") from err
