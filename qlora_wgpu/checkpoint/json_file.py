"""JSON files that must hold one object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qlora_wgpu.checkpoint.file_signatures import LFS_PREFIX
from qlora_wgpu.config.json_object import json_object
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.files import file_bytes
from qlora_wgpu.limits import MODEL_JSON_BYTES


def read_json_object(path: Path, most: int = MODEL_JSON_BYTES) -> dict[str, Any]:
    """Reads a JSON object.

    Args:
        path: The file.
        most: Bytes that it may have.

    Raises:
        CheckpointError: If the file is missing, too large, not JSON, or holds no object.
    """
    try:
        raw = file_bytes(path, most)
    except OSError as err:
        raise CheckpointError(f"{path} cannot be read: {err.strerror}") from err
    if raw.startswith(LFS_PREFIX):
        raise CheckpointError(f"{path} is a Git LFS pointer, not the file: run git lfs pull")
    return json_object(raw, path, CheckpointError)
