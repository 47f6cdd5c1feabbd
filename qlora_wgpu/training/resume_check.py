"""Whether a run in a folder may go on with a configuration."""

from __future__ import annotations

import warnings
from pathlib import Path

from qlora_wgpu.config import Config, load_config
from qlora_wgpu.config.renamed import RenamedKeyWarning
from qlora_wgpu.errors import ConfigError

# Where the run is written and shown, and what it runs on.
_FREE = ("output", "log", "device")


def holds_run(path: Path) -> bool:
    """Whether a folder holds a run with a checkpoint to go on from."""
    return (path / "config.yaml").is_file() and any((path / "checkpoints").glob("step-*"))


def check_same_run(path: Path, config: Config) -> None:
    """Makes sure that a run is not continued as another one.

    Raises:
        ConfigError: If a setting differs that decides what is computed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RenamedKeyWarning)  # the file is ours, not the user's
        before = load_config(path / "config.yaml").model_dump()
    for section, values in config.model_dump().items():
        if section in _FREE:
            continue
        for key, value in values.items():
            old = before[section].get(key)
            if old != value:
                raise ConfigError(
                    f"the run in {path} was begun with {section}.{key} = {old!r}, now it is "
                    f"{value!r}: go on with the old setting, or begin a new run in another "
                    "output.dir"
                )
