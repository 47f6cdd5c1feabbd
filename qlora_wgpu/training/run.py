"""The state that the parts of a run share: model, settings, folder and figures so far."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from qlora_wgpu.config import Config
from qlora_wgpu.errors import CheckpointError, TrainingError
from qlora_wgpu.model.adapter_model import AdapterModel
from qlora_wgpu.training.checkpoints import BestAdapter, RunState, save_best, save_checkpoint
from qlora_wgpu.training.computing import Computing, ThroughputMeter
from qlora_wgpu.training.data import SourceCounter
from qlora_wgpu.training.observers import Observer, WorkerFigures
from qlora_wgpu.training.preferences import Answers
from qlora_wgpu.training.run_folder import RunFolder, RunIdentity

_USUAL_BETA = 1e-6, 1e6


@dataclass
class Run:
    """A run that is going on."""

    model: AdapterModel  # the model, whose adapter is trained
    config: Config  # the settings
    observer: Observer  # who is told
    folder: RunFolder  # the folder that everything is written to
    identity: RunIdentity  # the settings, data and base that checkpoints belong to
    state: RunState  # the figures that checkpoints keep
    longest: int  # most tokens of a training row
    throughput: ThroughputMeter  # tokens per second
    computing: Computing  # who computes micro-batches
    saved_at: int = -1  # the step of the newest checkpoint; -1 without
    best: BestAdapter | None = None  # the adapter with the best evaluation, where it is kept
    saturated: int = 0  # values that kernels held at the end of their type, since this part began
    # What the workers of a cluster have done since the last row of the log, by name
    workers: dict[str, WorkerFigures] = field(default_factory=dict)
    sources: SourceCounter | None = None  # counts the rows of a mixture's sources, where it is one
    answers: Answers | None = None  # the training data as an objective over answers reads it
    held_out_answers: Answers | None = None  # the held-out data, likewise
    _started: float | None = None

    def start_clock(self) -> None:
        """The steps of this part begin; the time of earlier parts counts, too."""
        self._started = time.perf_counter() - self.state.seconds

    def read_clock(self) -> None:
        """Notes how long all parts have taken so far."""
        if self._started is not None:
            self.state.seconds = time.perf_counter() - self._started

    @property
    def keeps_best(self) -> bool:
        """Whether the best adapter is kept beside the last one."""
        settings = self.config.eval
        return settings.load_best_model_at_end or settings.early_stopping_patience is not None

    def save(self) -> bool:
        """Writes a checkpoint and removes those that are too many; False if it cannot be written.

        That does not end a run: older checkpoints stay, and the next save is another try.
        """
        with self.throughput.paused():
            try:
                self._save()
            except CheckpointError as err:
                self.observer.warning(
                    f"the state after step {self.state.step} was not saved: {err}; {self._kept()}"
                )
                return False
            self.tidy()
        self.observer.saved(self.folder.checkpoint_folder(self.saved_at))
        return True

    def save_best(self) -> None:
        """Writes the best adapter into its folder, if it is not there."""
        if self.best is not None and not self.best.is_saved:
            self.folder.require_own()
            self.best = save_best(self.folder.best, self.model, self.best)

    def _save(self) -> None:
        self.folder.require_own()
        self.save_best()  # a checkpoint that names it could not be gone on with rightly
        self.folder.flush_log()
        self.read_clock()
        self.state.log_digest = self.folder.log_digest
        folder = self.folder.checkpoint_folder(self.state.step)
        save_checkpoint(folder, self.model, self.state, self.identity.record)
        self.saved_at = self.state.step

    def _kept(self) -> str:
        return "no other one is there yet" if self.saved_at < 0 else f"step-{self.saved_at} is kept"

    def tidy(self) -> None:
        """Removes what a new checkpoint or adapter has made superfluous; what stays is no harm."""
        try:
            self.folder.forget_replaced()
            self.folder.prune(self.config.output.save_total_limit)
        except CheckpointError as err:
            self.observer.warning(f"{err}; it does no harm there")

    def failure(self, what: str) -> TrainingError:
        """The error that ends a run which learns nothing any more."""
        return TrainingError(
            f"{what}; the checkpoints in {self.folder.checkpoints} are kept: try a lower "
            "optim.learning_rate or more warm-up"
        )

    def failure_at_start(self, what: str) -> TrainingError:
        """The error that ends a run before it has learnt anything: no rate has had a part in it."""
        train = self.config.train
        cause = (
            "the base, or the adapter of lora.init_from, computes numbers that are too large; try "
            "train.compute_dtype: float32, or another base"
        )
        if train.objective != "sft" and not _USUAL_BETA[0] <= train.beta <= _USUAL_BETA[1]:
            cause = f"with a train.beta of {train.beta:g}; take one nearer to 0.1, the default"
        return TrainingError(f"{what}, before anything is learnt: {cause}")
