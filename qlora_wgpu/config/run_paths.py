"""What a run writes into its folder, by name."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from qlora_wgpu.presence import exists, is_file

CHECKPOINTS = "checkpoints"


class RunPaths:
    """The files and folders of a run.

    Attributes:
        path: The run's folder.
        adapter: Folder of the final adapter.
        best: Folder of the adapter with the best evaluation.
        checkpoints: Folder of the checkpoints.
        config: Its settings.
        metrics: Its log: a row for each logged step and each evaluation.
        samples: What the model has written.
        progress: How far it is to go, and who runs it.
        report: Its page.
        plot: A picture of its losses.
        tensorboard: Folder of TensorBoard's files.
        wandb_id: Under which id Weights & Biases knows it.
        replaced: Folder of a run that this one is to replace.
        lock: Held by who writes it.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self.adapter = self.path / "adapter"
        self.best = self.path / "best"
        self.checkpoints = self.path / CHECKPOINTS
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.samples = self.path / "samples.jsonl"
        self.progress = self.path / "progress.json"
        self.report = self.path / "report.html"
        self.plot = self.path / "loss.png"
        self.tensorboard = self.path / "tensorboard"
        self.wandb_id = self.path / "wandb-id.txt"
        self.replaced = self.path / "replaced"
        self.lock = self.path / ".lock"

    @property
    def needed(self) -> tuple[Path, ...]:
        """What a run is or goes on from; where one of them is, there is a run."""
        return self.adapter, self.best, self.checkpoints, self.metrics, self.config

    @property
    def written(self) -> tuple[Path, ...]:
        """All that a run writes for itself and for who looks at it."""
        shown = self.samples, self.progress, self.report, self.plot, self.tensorboard, self.wandb_id
        return *self.needed, *shown

    @property
    def is_run(self) -> bool:
        """Whether it is a run's folder: with its settings, and the log that it begins with."""
        return is_file(self.config) and is_file(self.metrics)

    @property
    def kept_run(self) -> Path | None:
        """Where the run is that this one is to replace, until it has something to show."""
        return self.replaced if exists(self.replaced) else None


def run_around(adapter: Path) -> Path:
    """The folder that a run would have to which an adapter, or a checkpoint, belongs."""
    parent = adapter.parent
    return parent.parent if parent.name == CHECKPOINTS else parent
