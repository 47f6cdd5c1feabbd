"""A run as its folder shows it, while another process writes it or when it has ended."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from qlora_wgpu.checkpoint.manifest import read_json_object
from qlora_wgpu.config.run_paths import RunPaths
from qlora_wgpu.errors import CheckpointError, ConfigError
from qlora_wgpu.presence import exists
from qlora_wgpu.supervision.processes import is_running
from qlora_wgpu.training import read_rows
from qlora_wgpu.training.observers import Row


@dataclass(frozen=True)
class RunStatus:
    """What a run's folder says."""

    path: Path  # the folder
    total_steps: int  # steps that the run is to have; 0 where nothing says it
    steps: list[Row]  # the logged steps' rows
    evaluations: list[Row]  # the evaluations' rows
    texts: list[Row]  # what the model has written, as ``samples.jsonl`` has it
    is_running: bool | None  # whether a process writes it; None where nobody here knows

    @property
    def step(self) -> int:
        """Steps done, as far as they are logged."""
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def state(self) -> str:
        """Where the run is, in words."""
        if self.is_running is None:
            return "written on another machine, or by a system that does not tell"
        if self.is_running:
            return "the run goes on"
        is_whole = 0 < self.total_steps <= self.step
        return "the run has ended" if is_whole else "nobody is running it"

    @property
    def latest_texts(self) -> list[Row]:
        """What the model has written last."""
        return [row for row in self.texts if row["step"] == self.texts[-1]["step"]]


def read_run(path: str | os.PathLike[str]) -> RunStatus:
    """Reads a run's folder."""
    paths = RunPaths(path)
    if not exists(paths.metrics):
        raise ConfigError(f"{paths.path} holds no run: metrics.jsonl is not there (yet)")
    rows = read_rows(paths.metrics)
    progress = _progress(paths.progress)
    total = progress.get("total_steps")
    return RunStatus(
        paths.path,
        total if isinstance(total, int) else 0,
        [row for row in rows if "eval_loss" not in row],
        [row for row in rows if row.get("eval_loss") is not None],
        read_rows(paths.samples),
        _is_running(progress),
    )


def _progress(path: Path) -> Row:
    try:
        return read_json_object(path) if exists(path) else {}
    except CheckpointError:
        return {}


def _is_running(progress: Row) -> bool | None:
    """Whether the process that wrote it last is there; None where nobody here knows."""
    pid = progress.get("pid")
    if not isinstance(pid, int) or pid <= 0:
        return False
    return is_running(pid) if progress.get("host") == socket.gethostname() else None
