"""The training loop: micro-batches are summed on the device, and updated from once a step.

Nothing is read back inside a step but a few bytes for the log, and those one step late.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qlora_wgpu.checkpoint import atomic_folder
from qlora_wgpu.config import Config
from qlora_wgpu.data import Dataset, bucket_length
from qlora_wgpu.errors import ConfigError, DataError, TrainingError
from qlora_wgpu.gpu.readback import Readback
from qlora_wgpu.model.batch_encoding import IGNORED
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.ops.adamw import STATS_LOSS, STATS_NORM, STATS_TOKENS
from qlora_wgpu.ops.cross_entropy import Objective
from qlora_wgpu.training.batching import BatchPlan, in_order, padded_batch
from qlora_wgpu.training.checkpoints import load_newest, save_checkpoint
from qlora_wgpu.training.divergence import Divergence
from qlora_wgpu.training.observer import Observer, Row
from qlora_wgpu.training.optimizer import Optimizer
from qlora_wgpu.training.resume_check import check_same_run, holds_run
from qlora_wgpu.training.rows import as_dataset
from qlora_wgpu.training.run_folder import RunFolder
from qlora_wgpu.training.schedule import learning_rates
from qlora_wgpu.training.state import RunState
from qlora_wgpu.training.stopping import StopRequest
from qlora_wgpu.training.throughput import ThroughputMeter


@dataclass(frozen=True)
class TrainResult:
    """What a run ended with.

    Attributes:
        steps: Optimizer steps done.
        train_loss: Mean loss over the label tokens of the last logged steps, or None.
        eval_loss_before: Held-out loss before the first step, if there is held-out data.
        eval_loss: Held-out loss after the last step, if there is held-out data.
        best_eval_loss: The lowest held-out loss.
        best_step: When it was measured.
        num_tokens: Tokens trained on, padding not counted.
        seconds: Time from the first step to the end.
        interrupted: Whether the user stopped it early.
        stopped_early: Whether it ended because the held-out loss no longer fell.
        run_dir: The run's folder.
        adapter_dir: The final adapter within it.
        peak_bytes: Most bytes that were ever allocated on the device.
    """

    steps: int
    train_loss: float | None
    eval_loss_before: float | None
    eval_loss: float | None
    best_eval_loss: float | None
    best_step: int | None
    num_tokens: int
    seconds: float
    interrupted: bool
    stopped_early: bool
    run_dir: Path
    adapter_dir: Path
    peak_bytes: int


@dataclass
class _Submitted:
    """A step that the device may still be working on."""

    step: int
    learning_rate: float
    tokens: int


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
            model: Whose adapter is trained; its own LoraConfig and QuantConfig count.
            config: The settings.
            observer: Told of every step.
            overwrite: Whether a run in ``output.dir`` may be replaced.
            resume: Whether the run in ``output.dir`` goes on from its newest whole checkpoint; a
                folder without one begins a new run.
        """
        self.model = model
        self.config = config
        self._observer = observer or Observer()
        self._resume = resume and holds_run(Path(config.output.dir))
        self._overwrite = overwrite or resume
        self._state = RunState()
        self._saved_at = 0
        self._throughput = ThroughputMeter()
        self._divergence = Divergence()

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
        rows = as_dataset(train_dataset, "train_dataset", vocab)
        held_out = as_dataset(eval_dataset, "eval_dataset", vocab) if eval_dataset else None
        if not rows.num_label_tokens:
            raise DataError("train_dataset has no label at all: nothing would be learnt")
        if held_out is not None and not held_out.num_label_tokens:
            raise DataError("eval_dataset has no label at all: there is no loss to measure")
        settings = self.config.train
        plan = BatchPlan.of(rows.lengths, self.config)
        self.model.gradient_checkpointing = settings.gradient_checkpointing
        self.model.objective = Objective(settings.label_smoothing_factor, settings.z_loss_weight)
        self.model.neftune_noise_alpha = settings.neftune_noise_alpha
        self.model.zero_gradient()
        self._prepare_longest(plan)
        optimizer = Optimizer(self.model, self.config.optim, plan.total_steps)
        folder = self._open_folder(rows)
        self._observer.started(plan.total_steps, self._state.step, self.model.device.memory.by_kind)
        state = self._state
        if not self._resume:
            state.eval_loss_before = self._evaluate(held_out, 0, folder)
        started = time.perf_counter()
        interrupted = self._run(rows, held_out, plan, optimizer, folder)
        seconds = time.perf_counter() - started
        if state.eval_step != state.step and not interrupted:
            self._evaluate(held_out, state.step, folder)
        if interrupted and self._saved_at != state.step:
            self.model.zero_gradient()
            self._save(folder)
        if self.config.eval.load_best_model_at_end and folder.best.exists() and not interrupted:
            self.model.load_adapter(folder.best)
        self.model.save_adapter(folder.adapter)
        self._observer.saved(folder.adapter)
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
            stopped_early=not interrupted and state.step < plan.total_steps,
            run_dir=folder.path,
            adapter_dir=folder.adapter,
            peak_bytes=self.model.device.memory.peak,
        )

    def _run(
        self,
        rows: Dataset,
        held_out: Dataset | None,
        plan: BatchPlan,
        optimizer: Optimizer,
        folder: RunFolder,
    ) -> bool:
        """All steps that are left; whether somebody stopped it."""
        readback = Readback(self.model.device, *self.model.stats_window)
        submitted: deque[_Submitted] = deque()
        rates = learning_rates(self.config.optim, plan.total_steps)
        every = self._eval_every(plan.total_steps)
        self._throughput.start()
        with StopRequest() as stop:
            try:
                for step in range(self._state.step + 1, plan.total_steps + 1):
                    tokens = self._submit_blocks(rows, plan, step, stop)
                    if tokens is None:
                        break
                    optimizer.step(step)
                    readback.request()
                    self.model.zero_stats()
                    submitted.append(_Submitted(step, float(rates[step - 1]), tokens))
                    evaluates = held_out is not None and every > 0 and step % every == 0
                    saves = step % self.config.output.save_steps == 0
                    # One step stays on its way unless somebody needs the device's state now.
                    while submitted and (readback.full or evaluates or saves):
                        self._finish(submitted.popleft(), readback.take(), folder)
                    if evaluates:
                        self._evaluate(held_out, step, folder)
                    if saves:
                        self._save(folder)
                    if self._has_stalled:
                        self._observer.warning(
                            f"stopped early after step {step}: the held-out loss has not fallen in "
                            f"{self._state.without_gain} evaluations"
                        )
                        break
            except KeyboardInterrupt:
                stop.requested = True
            while submitted:
                self._finish(submitted.popleft(), readback.take(), folder)
        return stop.requested

    # -- a step ----------------------------------------------------------------------------

    def _submit_blocks(
        self, rows: Dataset, plan: BatchPlan, step: int, stop: StopRequest
    ) -> int | None:
        """Queues a step's micro-batches; the number of its tokens, or None if it was stopped."""
        tokens, labels = 0, 0
        for index, chosen in enumerate(plan.blocks(step - 1)):
            if stop.requested:
                return None
            examples = [[rows[i] for i in row] for row in chosen]
            tokens += sum(len(e) for row in examples for e in row)
            if not any(e.num_label_tokens for row in examples for e in row):
                continue
            batch = padded_batch(examples, plan.batch_size, self._longest)
            key = plan.dropout_key(step, index) if self._is_random else None
            checked = self.model.checked(batch.input_ids, batch.labels, batch.attention_mask)
            labels += self.model.accumulate(*checked, dropout_key=key)
        if not labels:
            self._observer.warning(
                f"step {step}: none of its rows has a label, so nothing was updated"
            )
        return tokens

    @property
    def _is_random(self) -> bool:
        return self.model.adapter.config.lora_dropout > 0 or self.model.neftune_noise_alpha > 0

    def _finish(self, submitted: _Submitted, data: bytes, folder: RunFolder) -> None:
        """Logs a step whose figures have arrived."""
        stats = np.frombuffer(data, np.float32)
        loss, labels = float(stats[STATS_LOSS]), int(stats[STATS_TOKENS])
        norm = float(stats[STATS_NORM])
        state = self._state
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise TrainingError(
                f"the loss or its gradient is no longer finite at step {submitted.step}; the "
                f"checkpoints in {folder.checkpoints} are kept: try a lower optim.learning_rate "
                "or more warm-up"
            )
        if labels and self._divergence.diverged(loss / labels):
            raise TrainingError(
                f"the loss has diverged: {loss / labels:.2f} at step {submitted.step}, and for ten "
                f"steps far above the first ones; the checkpoints in {folder.checkpoints} are "
                "kept: try a lower optim.learning_rate or more warm-up"
            )
        state.step = submitted.step
        state.num_tokens += submitted.tokens
        state.window.append((loss, float(labels)))
        self._throughput.add(submitted.tokens)
        if submitted.step % self.config.log.logging_steps:
            return
        total, count = sum(w[0] for w in state.window), sum(w[1] for w in state.window)
        state.last_loss = total / count if count else None
        row: Row = {
            "step": submitted.step,
            "loss": state.last_loss,
            "learning_rate": submitted.learning_rate,
            "grad_norm": norm,
            "num_tokens": state.num_tokens,
            "tokens_per_second": self._throughput.tokens_per_second,
        }
        state.window.clear()
        folder.log(row)
        self._observer.step(row)

    # -- around the steps ------------------------------------------------------------------

    def _open_folder(self, rows: Dataset) -> RunFolder:
        """A new run's folder, or an old one's with its newest checkpoint loaded."""
        path, text = Path(self.config.output.dir), self.config.to_yaml()
        if not self._resume:
            self._state.data = rows.fingerprint
            return RunFolder(path, text, overwrite=self._overwrite)
        check_same_run(path, self.config)
        folder = RunFolder(path, text, resume=True)
        found, self._state, passed = load_newest(folder.checkpoint_folders(), self.model)
        for sentence in passed:
            self._observer.warning(sentence)
        if self._state.data != rows.fingerprint:
            raise ConfigError(
                f"the run in {path} was begun with other training data: go on with the same, or "
                "begin a new run in another output.dir"
            )
        folder.forget_after(self._state.step)
        self._saved_at = self._state.step
        self._observer.resumed(found, self._state.step)
        return folder

    def _prepare_longest(self, plan: BatchPlan) -> None:
        """Compiles for the longest batch first, so that all memory is taken before training."""
        self._longest = max(self.config.data.max_seq_length, plan.longest)
        self.model.prepare(plan.batch_size, bucket_length(plan.longest, self._longest))

    def _eval_every(self, total: int) -> int:
        wanted = self.config.eval.eval_steps
        return int(wanted) if wanted >= 1 or wanted == 0 else max(1, round(total * wanted))

    @property
    def _has_stalled(self) -> bool:
        patience = self.config.eval.early_stopping_patience
        return patience is not None and self._state.without_gain >= patience

    def _evaluate(self, rows: Dataset | None, step: int, folder: RunFolder) -> float | None:
        """The mean held-out loss per label token; keeps the adapter if it is the best so far."""
        if rows is None:
            return None
        self._throughput.pause()
        size = self.config.train.per_device_train_batch_size
        longest = max(self._longest, rows.longest)
        batches = (padded_batch(chunk, size, longest) for chunk in in_order(rows, size))
        total, count = self.model.summed_loss(
            (b.input_ids, b.labels, b.attention_mask)
            for b in batches
            if (b.labels[:, 1:] != IGNORED).any()
        )
        if not math.isfinite(total):
            raise TrainingError(
                f"the held-out loss is not finite after step {step}; the checkpoints in "
                f"{folder.checkpoints} are kept: try a lower optim.learning_rate or more warm-up"
            )
        loss = total / count
        row = {"step": step, "eval_loss": loss}
        folder.log(row)
        self._observer.evaluation(row)
        settings = self.config.eval
        best = self._state.evaluated(loss, step, settings.early_stopping_threshold)
        if (
            best
            and step
            and (settings.load_best_model_at_end or settings.early_stopping_patience is not None)
        ):
            with atomic_folder(folder.best) as unfinished:
                self.model.save_adapter(unfinished)
        self._throughput.resume()
        return loss

    def _save(self, folder: RunFolder) -> None:
        self._throughput.pause()
        step = self._saved_at = self._state.step
        save_checkpoint(folder.checkpoint_folder(step), self.model, self._state)
        folder.prune(self.config.output.save_total_limit)
        self._observer.saved(folder.checkpoint_folder(step))
        self._throughput.resume()
