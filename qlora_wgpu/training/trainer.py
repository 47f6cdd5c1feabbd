"""Training a model's adapter as a configuration says: what comes before and after the steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qlora_wgpu.config import Config
from qlora_wgpu.config.schema import TrainConfig
from qlora_wgpu.data import Dataset, bucket_length
from qlora_wgpu.errors import ConfigError, DataError
from qlora_wgpu.model.options import TrainingOptions
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.ops.cross_entropy import Objective
from qlora_wgpu.training.batching import BatchPlan
from qlora_wgpu.training.checkpoints import load_newest
from qlora_wgpu.training.evaluation import Evaluator
from qlora_wgpu.training.loop import TrainingLoop
from qlora_wgpu.training.observer import Observer
from qlora_wgpu.training.optimizer import Optimizer
from qlora_wgpu.training.result import TrainResult
from qlora_wgpu.training.resume_check import check_same_run, holds_run
from qlora_wgpu.training.rows import as_dataset
from qlora_wgpu.training.run import Run
from qlora_wgpu.training.run_folder import RunFolder
from qlora_wgpu.training.state import RunState


def training_options(settings: TrainConfig) -> TrainingOptions:
    """Options of training steps, from the ``train`` section."""
    return TrainingOptions(
        checkpointing=settings.gradient_checkpointing,
        objective=Objective(settings.label_smoothing_factor, settings.z_loss_weight),
        noise=settings.neftune_noise_alpha,
    )


class Trainer:
    """Trains a model's adapter as a configuration says."""

    def __init__(
        self,
        model: QLoRAModel,
        config: Config,
        observer: Observer | None = None,
        *,
        overwrite: bool = False,
        resume: bool = False,
    ) -> None:
        """Takes the settings of ``train``, ``optim``, ``eval``, ``log``, ``output`` and ``data``.

        Args:
            model: The model, whose adapter is trained; its own LoraConfig and QuantConfig count.
            config: The settings.
            observer: Who is told of every step.
            overwrite: Whether a run in ``output.dir`` may be replaced.
            resume: Whether the run in ``output.dir`` goes on from its newest whole checkpoint; a
                folder without one begins a new run.
        """
        self.model = model
        self.config = config
        self._observer = observer or Observer()
        self._resume = resume and holds_run(Path(config.output.dir))
        self._overwrite = overwrite or resume

    def train(
        self, train_dataset: Sequence[Any], eval_dataset: Sequence[Any] | None = None
    ) -> TrainResult:
        """Runs all steps and writes the run's folder.

        Ctrl-C and SIGTERM end it early, between two micro-batches, with its state saved.

        Args:
            train_dataset: A ``Dataset``, or mappings with ``input_ids`` and ``labels``.
            eval_dataset: Held-out data in the same form.

        Returns:
            The run's figures.

        Raises:
            DataError: If a data set has nothing to learn or does not fit the model.
            ConfigError: If ``output.dir`` holds a run or cannot be written, or is to go on with
                other settings or data.
            CheckpointError: If a run is to go on and none of its checkpoints can be loaded.
            TrainingError: If a gradient or a loss is not finite or the loss diverges; checkpoints
                before it are kept.
            OutOfMemoryError: If the device has no room.
        """
        vocab = self.model.architecture.vocab_size
        rows = _learnable(train_dataset, "train_dataset", vocab, "nothing would be learnt")
        held_out = None
        if eval_dataset:
            held_out = _learnable(
                eval_dataset, "eval_dataset", vocab, "there is no loss to measure"
            )
        plan = BatchPlan.of(rows.lengths, self.config)
        longest = max(self.config.data.max_seq_length, plan.longest)
        self.model.options = training_options(self.config.train)
        self.model.zero_gradient()
        # The longest batch first, so that all memory is taken before training.
        self.model.prepare(plan.batch_size, bucket_length(plan.longest, longest))
        optimizer = Optimizer(self.model, self.config.optim, plan.total_steps)
        run = self._open_run(rows, longest)
        evaluator = Evaluator(run, held_out, plan.total_steps)
        memory = self.model.device.memory.by_kind
        self._observer.started(plan.total_steps, run.state.step, memory)
        if not self._resume:
            run.state.eval_loss_before = evaluator.measure(0)
        started = time.perf_counter()
        interrupted = TrainingLoop(run, rows, plan, optimizer, evaluator).run()
        seconds = time.perf_counter() - started
        self._finish(run, evaluator, interrupted=interrupted)
        stopped_early = not interrupted and run.state.step < plan.total_steps
        result = _result(run, seconds, interrupted=interrupted, stopped_early=stopped_early)
        self._observer.finished(result)
        return result

    def _open_run(self, rows: Dataset, longest: int) -> Run:
        """A new run's folder, or an old one's with its newest checkpoint loaded."""
        path = Path(self.config.output.dir)
        if self._resume:
            return self._reopened(path, rows, longest)
        folder = RunFolder(path, self.config.to_yaml(), overwrite=self._overwrite)
        state = RunState(data=rows.fingerprint)
        return Run(self.model, self.config, self._observer, folder, state, longest)

    def _reopened(self, path: Path, rows: Dataset, longest: int) -> Run:
        check_same_run(path, self.config)
        folder = RunFolder(path, self.config.to_yaml(), resume=True)
        checkpoint, state, passed = load_newest(folder.checkpoint_folders(), self.model)
        for sentence in passed:
            self._observer.warning(sentence)
        if state.data != rows.fingerprint:
            raise ConfigError(
                f"the run in {path} was begun with other training data: go on with the same, or "
                "begin a new run in another output.dir"
            )
        folder.forget_after(state.step)
        self._observer.resumed(checkpoint, state.step)
        return Run(
            self.model, self.config, self._observer, folder, state, longest, saved_at=state.step
        )

    def _finish(self, run: Run, evaluator: Evaluator, *, interrupted: bool) -> None:
        """Measures and writes what a run ends with."""
        state, folder = run.state, run.folder
        if state.eval_step != state.step and not interrupted:
            evaluator.measure(state.step)
        if interrupted and run.saved_at != state.step:
            self.model.zero_gradient()
            run.save()
        if self.config.eval.load_best_model_at_end and folder.best.exists() and not interrupted:
            self.model.load_adapter(folder.best)
        self.model.save_adapter(folder.adapter)
        self._observer.saved(folder.adapter)


def _learnable(rows: Sequence[Any], name: str, vocab_size: int, otherwise: str) -> Dataset:
    """A data set that has labels.

    Raises:
        DataError: If it has none, is empty, or does not fit the model.
    """
    dataset = as_dataset(rows, name, vocab_size)
    if not dataset.num_label_tokens:
        raise DataError(f"{name} has no label at all: {otherwise}")
    return dataset


def _result(run: Run, seconds: float, *, interrupted: bool, stopped_early: bool) -> TrainResult:
    state = run.state
    return TrainResult(
        steps=state.step,
        train_loss=state.last_loss,
        eval_loss_before=state.eval_loss_before,
        eval_loss=state.eval_loss if state.eval_step == state.step else None,
        best_eval_loss=state.best_loss,
        best_step=state.best_step if state.best_step >= 0 else None,
        num_tokens=state.num_tokens,
        seconds=seconds,
        interrupted=interrupted,
        stopped_early=stopped_early,
        run_dir=run.folder.path,
        adapter_dir=run.folder.adapter,
        peak_bytes=run.model.device.memory.peak,
    )
