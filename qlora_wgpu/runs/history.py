"""A run as its folder tells it: the log, and where the run is, while it goes on and afterwards."""

import importlib
import socket
from collections.abc import Sequence
from contextlib import suppress
from os import PathLike
from typing import Any

from qlora_wgpu.config.paths import RunPaths
from qlora_wgpu.config.yaml import read_json_object
from qlora_wgpu.errors import CheckpointError, ConfigError
from qlora_wgpu.files import exists
from qlora_wgpu.report.page import inline
from qlora_wgpu.supervision.processes import is_running
from qlora_wgpu.training.observers import Row
from qlora_wgpu.training.run_folder import read_rows


class RunHistory:
    """What a run has logged. A notebook shows its curves.

    Attributes:
        rows: The rows of ``metrics.jsonl``, of steps and of evaluations, as they were written.
        samples: The rows of ``samples.jsonl``: what the model has written.
    """

    def __init__(self, rows: Sequence[Row], samples: Sequence[Row] = ()) -> None:
        """Takes rows."""
        self.rows, self.samples = list(rows), list(samples)

    @property
    def steps(self) -> list[Row]:
        """The rows of steps."""
        return [row for row in self.rows if "eval_loss" not in row]

    @property
    def evaluations(self) -> list[Row]:
        """The rows of evaluations that have a loss."""
        return [row for row in self.rows if row.get("eval_loss") is not None]

    def __repr__(self) -> str:
        last = self.rows[-1]["step"] if self.rows else 0
        return f"RunHistory({len(self.rows):,} rows up to step {last:,})"

    def _repr_html_(self) -> str:
        return inline(self.rows)

    def to_pandas(self) -> Any:
        """A ``DataFrame`` with one row per step, evaluations in the same row.

        Raises:
            ConfigError: If pandas is not installed.
        """
        try:
            pandas = importlib.import_module("pandas")
        except ImportError:
            raise ConfigError("pandas is not installed: pip install pandas") from None
        steps: dict[int, Row] = {}
        for row in self.rows:
            steps.setdefault(row["step"], {}).update(row)
        table = pandas.DataFrame([steps[step] for step in sorted(steps)])
        return table.set_index("step") if steps else table


def read_log(run: str | PathLike[str]) -> RunHistory:
    """The log of the run in a folder, whoever writes it.

    Raises:
        ConfigError: If there is none.
        CheckpointError: If it cannot be read.
    """
    paths = RunPaths(run)
    if not exists(paths.metrics):
        raise ConfigError(f"{paths.path} holds no run: metrics.jsonl is not there")
    return RunHistory(read_rows(paths.metrics), read_rows(paths.samples))


class RunStatus(RunHistory):
    """The same, and where the run is, which another process may be writing."""

    def __init__(self, run: str | PathLike[str]) -> None:
        """Reads a run's folder."""
        paths = RunPaths(run)
        if not exists(paths.metrics):
            raise ConfigError(f"{paths.path} holds no run: metrics.jsonl is not there (yet)")
        super().__init__(read_rows(paths.metrics), read_rows(paths.samples))
        self.path = paths.path
        progress: Row = {}
        with suppress(CheckpointError):
            progress = read_json_object(paths.progress) if exists(paths.progress) else {}
        total = progress.get("total_steps")
        self.total_steps = total if isinstance(total, int) else 0  # 0 where nothing says it
        pid, self.is_running = progress.get("pid"), None  # where nobody here knows
        if not isinstance(pid, int) or pid <= 0:
            self.is_running = False
        elif progress.get("host") == socket.gethostname():
            self.is_running = is_running(pid)

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
    def latest_samples(self) -> list[Row]:
        """What the model has written last."""
        return [row for row in self.samples if row["step"] == self.samples[-1]["step"]]
