"""What a run writes into its folder, by name."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from qlora_wgpu.presence import exists, is_file

CHECKPOINTS = "checkpoints"


class RunPaths:
    """The files and folders of a run."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)  # the run's folder
        self.adapter = self.path / "adapter"  # folder of the final adapter
        self.best = self.path / "best"  # folder of the adapter with the best evaluation
        self.checkpoints = self.path / CHECKPOINTS  # folder of the checkpoints
        self.config = self.path / "config.yaml"  # its settings
        self.metrics = self.path / "metrics.jsonl"  # its log: rows of steps and evaluations
        self.samples = self.path / "samples.jsonl"  # what the model has written
        self.progress = self.path / "progress.json"  # how far it is to go, and who runs it
        self.report = self.path / "report.html"  # its page
        self.result = self.path / "result.json"  # what it has come to, once it has ended
        self.plot = self.path / "loss.png"  # a picture of its losses
        self.tensorboard = self.path / "tensorboard"  # folder of TensorBoard's files
        self.wandb_id = self.path / "wandb-id.txt"  # under which id Weights & Biases knows it
        self.replaced = self.path / "replaced"  # folder of a run that this one is to replace
        self.lock = self.path / ".lock"  # held by who writes it

    @property
    def needed(self) -> tuple[Path, ...]:
        """What a run is or goes on from; where one of them is, there is a run."""
        return self.adapter, self.best, self.checkpoints, self.metrics, self.config

    @property
    def written(self) -> tuple[Path, ...]:
        """All that a run writes for itself and for who looks at it."""
        shown = self.samples, self.progress, self.report, self.result, self.plot
        return *self.needed, *shown, self.tensorboard, self.wandb_id

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
