"""Files that a command writes, looked at before minutes are spent on what goes into them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from qlora_wgpu.checkpoint.atomic import write_file
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.presence import exists, is_dir


def target_file(option: str, name: str) -> Path:
    """Where an option's file goes; where a link leads, so that the link stays one.

    Raises:
        ConfigError: If nothing can be written there.
    """
    path = Path(name).expanduser()
    if not name or is_dir(path):
        raise ConfigError(f"{option} {name!r} is not a file name: give one such as figures.json")
    if not is_dir(path.parent):
        raise ConfigError(f"{option} {name}: there is no folder {path.parent}")
    if not os.access(path if exists(path) else path.parent, os.W_OK):
        raise ConfigError(f"{option} {name} cannot be written: you may not write there")
    return path.resolve() if path.is_symlink() else path


def write_figures(path: Path, figures: dict[str, Any]) -> None:
    """Writes an option's file as JSON.

    Raises:
        CheckpointError: If that fails.
    """
    write_file(path, (json.dumps(figures, indent=1) + "\n").encode())
