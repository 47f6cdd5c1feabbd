"""JSON files that must hold one object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qlora_wgpu.checkpoint.file_signatures import LFS_PREFIX
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
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as err:
        raise CheckpointError(f"{path} is not valid UTF-8 at byte {err.start}") from err
    except json.JSONDecodeError as err:
        where = f"line {err.lineno}, column {err.colno}"
        raise CheckpointError(f"{path} is not valid JSON ({where}: {err.msg})") from err
    except (RecursionError, ValueError) as err:
        raise CheckpointError(f"{path} is not valid JSON: {err}") from err
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value
