"""The log of a run, to be looked at in Python."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from os import PathLike
from typing import Any

from qlora_wgpu.config.run_paths import RunPaths
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.presence import exists
from qlora_wgpu.report.page import inline
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
