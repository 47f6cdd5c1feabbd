"""A run's folder: config.yaml, metrics.jsonl, checkpoints/, best/ and adapter/."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from qlora_wgpu.errors import ConfigError
from qlora_wgpu.files import file_text
from qlora_wgpu.limits import OWN_LOG_BYTES

_WRITTEN = ("adapter", "best", "checkpoints", "metrics.jsonl", "config.yaml")


def refuse_existing_run(path: Path) -> None:
    """Raises a ConfigError if a folder holds anything that a run would replace."""
    written = next((name for name in _WRITTEN if (path / name).exists()), None)
    if written is not None:
        raise ConfigError(
            f"output.dir {path} already holds a run ({written}): choose another folder, or train "
            "with --resume to go on with it or with --overwrite to replace it"
        )


class RunFolder:
    """Writes what a run leaves behind.

    Attributes:
        path: The folder.
        adapter: Folder of the final adapter.
        best: Folder of the adapter with the lowest held-out loss.
        checkpoints: Folder of the checkpoints.
    """

    def __init__(
        self, path: Path, config_yaml: str, *, overwrite: bool = False, resume: bool = False
    ) -> None:
        """Creates the folder and saves the resolved configuration in it.

        Args:
            path: The folder.
            config_yaml: The configuration.
            overwrite: Whether a run that is there may be replaced.
            resume: Whether a run that is there goes on; its files stay as they are.

        Raises:
            ConfigError: If it holds a run already, or cannot be created.
        """
        self.path = path
        self.adapter = path / "adapter"
        self.best = path / "best"
        self.checkpoints = path / "checkpoints"
        self._metrics = path / "metrics.jsonl"
        if resume:
            return
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
        for folder in (self.adapter, self.best, self.checkpoints):
            if folder.exists():
                shutil.rmtree(folder)

    def log(self, row: dict[str, Any]) -> None:
        """Appends a row to metrics.jsonl."""
        with self._metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl; a last one that was cut off is left out."""
        rows = []
        text = file_text(self._metrics, OWN_LOG_BYTES) if self._metrics.exists() else ""
        for line in text.splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
        return rows

    def forget_after(self, step: int) -> None:
        """Removes the rows and checkpoints of later steps, which will be done again."""
        kept = [row for row in self.rows() if row.get("step", 0) <= step]
        text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in kept)
        unfinished = self._metrics.with_suffix(".unfinished")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(self._metrics)
        for folder in self.checkpoint_folders():
            if _step_of(folder) > step:
                shutil.rmtree(folder)

    def checkpoint_folder(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.checkpoints / f"step-{step}"

    def checkpoint_folders(self) -> list[Path]:
        """The checkpoints that are there, oldest first."""
        folders = [p for p in self.checkpoints.glob("step-*") if _step_of(p) >= 0]
        return sorted(folders, key=_step_of)

    def prune(self, keep: int | None) -> None:
        """Removes all but the newest ``keep`` checkpoints."""
        if keep is None:
            return
        for old in self.checkpoint_folders()[:-keep]:
            shutil.rmtree(old)


def _step_of(folder: Path) -> int:
    digits = folder.name.removeprefix("step-")
    return int(digits) if digits.isdigit() else -1
