"""A run's folder: config.yaml, metrics.jsonl, checkpoints/ and adapter/."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from qlora_wgpu.errors import ConfigError

_WRITTEN = ("adapter", "checkpoints", "metrics.jsonl", "config.yaml")


def refuse_existing_run(path: Path) -> None:
    """Raises a ConfigError if a folder holds anything that a run would replace."""
    found = next((name for name in _WRITTEN if (path / name).exists()), None)
    if found is not None:
        raise ConfigError(
            f"output.dir {path} already holds a run ({found}): choose another folder, or train "
            "with --overwrite to replace it"
        )


class RunFolder:
    """Writes what a run leaves behind.

    Attributes:
        path: The folder.
        adapter: Where the final adapter goes.
        checkpoints: Where checkpoints go.
    """

    def __init__(self, path: Path, config_yaml: str, *, overwrite: bool = False) -> None:
        """Creates the folder and saves the resolved configuration in it.

        Raises:
            ConfigError: If it holds a run already, or cannot be created.
        """
        self.path = path
        self.adapter = path / "adapter"
        self.checkpoints = path / "checkpoints"
        self._metrics = path / "metrics.jsonl"
        if not overwrite:
            refuse_existing_run(path)
        try:
            self._remove_old_run()
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            (path / "config.yaml").write_text(config_yaml, encoding="utf-8")
            self._metrics.write_text("", encoding="utf-8")
        except OSError as err:
            raise ConfigError(f"output.dir {path} cannot be written: {err.strerror}") from err

    def _remove_old_run(self) -> None:
        self._metrics.unlink(missing_ok=True)
        for folder in (self.adapter, self.checkpoints):
            if folder.exists():
                shutil.rmtree(folder)

    def log(self, row: dict[str, Any]) -> None:
        """Appends a row to metrics.jsonl."""
        with self._metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")

    def checkpoint_folder(self, step: int) -> Path:
        """Where a step's checkpoint goes."""
        return self.checkpoints / f"step-{step}"

    def prune(self, keep: int | None) -> None:
        """Removes all but the newest ``keep`` checkpoints."""
        if keep is None:
            return
        found = sorted(
            self.checkpoints.glob("step-*"), key=lambda p: int(p.name.removeprefix("step-"))
        )
        for old in found[:-keep]:
            shutil.rmtree(old)
