"""JSON that must hold one object, and a sentence where it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qlora_wgpu.errors import QLoRAError
from qlora_wgpu.files import file_bytes


def read_json_object(path: Path, most: int, error: type[QLoRAError]) -> dict[str, Any]:
    """Reads a JSON object.

    Args:
        path: The file.
        most: Bytes that it may have.
        error: What is raised.

    Raises:
        QLoRAError: As ``error``, if the file is missing, too large, not JSON, or holds no object.
    """
    try:
        raw = file_bytes(path, most)
    except OSError as err:
        raise error(f"{path} cannot be read: {err.strerror or err}") from err
    return json_object(raw, path, error)


def json_object(raw: bytes, path: Path, error: type[QLoRAError]) -> dict[str, Any]:
    """The object that a file's bytes hold; arguments as for ``read_json_object``.

    Raises:
        QLoRAError: As ``error``, if they are not JSON, or hold no object.
    """
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as err:
        raise error(f"{path} is not valid UTF-8 at byte {err.start}") from err
    except json.JSONDecodeError as err:
        where = f"line {err.lineno}, column {err.colno}"
        raise error(f"{path} is not valid JSON ({where}: {err.msg})") from err
    except (RecursionError, ValueError) as err:
        raise error(f"{path} is not valid JSON: {err}") from err
    if not isinstance(value, dict):
        kind = "null" if value is None else f"a {type(value).__name__}"
        raise error(f"{path} must hold a JSON object, not {kind}")
    return value
