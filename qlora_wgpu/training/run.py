"""The state that the parts of a run share: model, settings, folder and figures so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from qlora_wgpu.config import Config
from qlora_wgpu.errors import TrainingError
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.training.checkpoints import save_checkpoint
from qlora_wgpu.training.observer import Observer
from qlora_wgpu.training.run_folder import RunFolder
from qlora_wgpu.training.state import RunState
from qlora_wgpu.training.throughput import ThroughputMeter


@dataclass
class Run:
    """A run that is going on.

    Attributes:
        model: The model, whose adapter is trained.
        config: The settings.
        observer: Who is told.
        folder: The folder that everything is written to.
        state: The figures that checkpoints keep.
        longest: Most tokens of a training row.
        saved_at: The step of the newest checkpoint.
        throughput: Tokens per second.
    """

    model: QLoRAModel
    config: Config
    observer: Observer
    folder: RunFolder
    state: RunState
    longest: int
    saved_at: int = 0
    throughput: ThroughputMeter = field(default_factory=ThroughputMeter)

    def save(self) -> None:
        """Writes a checkpoint and removes those that are too many."""
        with self.throughput.paused():
            step = self.saved_at = self.state.step
            save_checkpoint(self.folder.checkpoint_folder(step), self.model, self.state)
            self.folder.prune(self.config.output.save_total_limit)
            self.observer.saved(self.folder.checkpoint_folder(step))

    def failure(self, what: str) -> TrainingError:
        """The error that ends a run which learns nothing any more."""
        return TrainingError(
            f"{what}; the checkpoints in {self.folder.checkpoints} are kept: try a lower "
            "optim.learning_rate or more warm-up"
        )
