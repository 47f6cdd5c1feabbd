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

from qlora_wgpu.config import Config
from qlora_wgpu.data import Example, bucket_length
from qlora_wgpu.errors import DataError, TrainingError
from qlora_wgpu.gpu.readback import Readback
from qlora_wgpu.models.inputs import IGNORED
from qlora_wgpu.models.qlora_model import QLoRAModel
from qlora_wgpu.ops.adamw import STATS_LOSS, STATS_NORM, STATS_TOKENS
from qlora_wgpu.ops.cross_entropy import Objective
from qlora_wgpu.training.blocks import Schedule, in_order, padded_batch
from qlora_wgpu.training.checkpoints import save_checkpoint
from qlora_wgpu.training.observer import Observer, Row
from qlora_wgpu.training.optimizer import Optimizer
from qlora_wgpu.training.rows import as_examples
from qlora_wgpu.training.run_folder import RunFolder
from qlora_wgpu.training.schedule import learning_rates
from qlora_wgpu.training.speed import Speedometer


@dataclass(frozen=True)
class TrainResult:
    """What a run ended with.

    Attributes:
        steps: Optimizer steps done.
        train_loss: Mean loss over the label tokens of the last logged steps, or None.
        eval_loss_before: Held-out loss before the first step, if there is held-out data.
        eval_loss: Held-out loss after the last step, if there is held-out data.
        num_tokens: Tokens trained on, padding not counted.
        seconds: Time from the first step to the end.
        interrupted: Whether the user stopped it early.
        run_dir: The run's folder.
        adapter_dir: The final adapter within it.
        peak_bytes: Most bytes that were ever allocated on the device.
    """

    steps: int
    train_loss: float | None
    eval_loss_before: float | None
    eval_loss: float | None
    num_tokens: int
    seconds: float
    interrupted: bool
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
    ) -> None:
        """Takes the settings of ``train``, ``optim``, ``eval``, ``log``, ``output`` and ``data``.

        Args:
            model: Whose adapter is trained; its own LoraConfig and QuantConfig count.
            config: The settings.
            observer: Told of every step.
            overwrite: Whether a run in ``output.dir`` may be replaced.
        """
        self.model = model
        self.config = config
        self._observer = observer or Observer()
        self._overwrite = overwrite
        self._tokens_seen = 0
        self._window: list[tuple[float, float]] = []
        self._speed = Speedometer()
        self._last_loss: float | None = None

    def train(
        self, train_dataset: Sequence[Any], eval_dataset: Sequence[Any] | None = None
    ) -> TrainResult:
        """Runs all steps and writes the run's folder.

        Args:
            train_dataset: A ``Dataset``, or mappings with ``input_ids`` and ``labels``.
            eval_dataset: Held-out data in the same form.

        Returns:
            The run's figures; Ctrl-C ends it early, with the adapter saved.

        Raises:
            DataError: If a data set has nothing to learn or does not fit the model.
            ConfigError: If ``output.dir`` holds a run or cannot be written.
            TrainingError: If a gradient or a loss is not finite; checkpoints before it are kept.
            OutOfMemoryError: If the device has no room.
        """
        vocab = self.model.architecture.vocab_size
        rows = as_examples(train_dataset, "train_dataset", vocab)
        held_out = as_examples(eval_dataset, "eval_dataset", vocab) if eval_dataset else []
        if not any(row.num_label_tokens for row in rows):
            raise DataError("train_dataset has no label at all: nothing would be learnt")
        if held_out and not any(row.num_label_tokens for row in held_out):
            raise DataError("eval_dataset has no label at all: there is no loss to measure")
        settings = self.config.train
        schedule = Schedule.of(len(rows), settings)
        self.model.gradient_checkpointing = settings.gradient_checkpointing
        self.model.objective = Objective(settings.label_smoothing_factor, settings.z_loss_weight)
        self.model.zero_gradient()
        self._prepare_longest(rows)
        optimizer = Optimizer(self.model, self.config.optim, schedule.total_steps)
        folder = RunFolder(
            Path(self.config.output.dir), self.config.to_yaml(), overwrite=self._overwrite
        )
        self._observer.started(schedule.total_steps, self.model.device.memory.by_kind)

        before = self._evaluate(held_out, 0, folder)
        readback = Readback(self.model.device, *self.model.stats_window)
        submitted: deque[_Submitted] = deque()
        rates = learning_rates(self.config.optim, schedule.total_steps)
        every = self._eval_every(schedule.total_steps)
        started = time.perf_counter()
        self._speed.start()
        done, evaluated, interrupted = 0, None, False
        try:
            for step in range(1, schedule.total_steps + 1):
                tokens = self._submit_blocks(rows, schedule, step)
                optimizer.step(step)
                readback.request()
                self.model.zero_stats()
                submitted.append(_Submitted(step, float(rates[step - 1]), tokens))
                done = step
                evaluates = bool(held_out) and every > 0 and step % every == 0
                saves = step % self.config.output.save_steps == 0
                # One step stays on its way unless somebody needs the device's state now.
                while submitted and (readback.full or evaluates or saves):
                    self._finish(submitted.popleft(), readback.take(), folder)
                if evaluates:
                    evaluated = (step, self._evaluate(held_out, step, folder))
                if saves:
                    self._save(folder, optimizer, step)
            while submitted:
                self._finish(submitted.popleft(), readback.take(), folder)
        except KeyboardInterrupt:
            interrupted = True
            while submitted:
                self._finish(submitted.popleft(), readback.take(), folder)
            self.model.zero_gradient()
            self._save(folder, optimizer, done)
        seconds = time.perf_counter() - started
        after = evaluated[1] if evaluated and evaluated[0] == done else None
        if after is None and not interrupted:
            after = self._evaluate(held_out, done, folder)
        self.model.save_adapter(folder.adapter)
        self._observer.saved(folder.adapter)
        return TrainResult(
            steps=done,
            train_loss=self._last_loss,
            eval_loss_before=before,
            eval_loss=after,
            num_tokens=self._tokens_seen,
            seconds=seconds,
            interrupted=interrupted,
            run_dir=folder.path,
            adapter_dir=folder.adapter,
            peak_bytes=self.model.device.memory.peak,
        )

    # -- a step ----------------------------------------------------------------------------

    def _submit_blocks(self, rows: list[Example], schedule: Schedule, step: int) -> int:
        """Queues a step's micro-batches; returns the number of its tokens."""
        tokens, labels = 0, 0
        for index, chosen in enumerate(schedule.blocks(step - 1)):
            examples = [rows[i] for i in chosen]
            tokens += sum(map(len, examples))
            if not any(e.num_label_tokens for e in examples):
                continue
            batch = padded_batch(examples, schedule.batch_size, self._longest)
            key = schedule.dropout_key(step, index) if self._has_dropout else None
            checked = self.model.checked(batch.input_ids, batch.labels, batch.attention_mask)
            labels += self.model.accumulate(*checked, dropout_key=key)
        if not labels:
            self._observer.warning(
                f"step {step}: none of its rows has a label, so nothing was updated"
            )
        return tokens

    @property
    def _has_dropout(self) -> bool:
        return self.model.adapter.config.lora_dropout > 0

    def _finish(self, submitted: _Submitted, data: bytes, folder: RunFolder) -> None:
        """Logs a step whose figures have arrived."""
        stats = np.frombuffer(data, np.float32)
        loss, labels = float(stats[STATS_LOSS]), int(stats[STATS_TOKENS])
        norm = float(stats[STATS_NORM])
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise TrainingError(
                f"the loss or its gradient is no longer finite at step {submitted.step}; the "
                f"checkpoints in {folder.checkpoints} are kept: try a lower optim.learning_rate "
                "or more warm-up"
            )
        self._tokens_seen += submitted.tokens
        self._window.append((loss, float(labels)))
        self._speed.add(submitted.tokens)
        if submitted.step % self.config.log.logging_steps:
            return
        total, count = sum(w[0] for w in self._window), sum(w[1] for w in self._window)
        self._last_loss = total / count if count else None
        row: Row = {
            "step": submitted.step,
            "loss": self._last_loss,
            "learning_rate": submitted.learning_rate,
            "grad_norm": norm,
            "num_tokens": self._tokens_seen,
            "tokens_per_second": self._speed.tokens_per_second,
        }
        self._window.clear()
        folder.log(row)
        self._observer.step(row)

    # -- around the steps ------------------------------------------------------------------

    def _prepare_longest(self, rows: list[Example]) -> None:
        """Compiles for the longest batch first, so that all memory is taken before training."""
        longest = max(map(len, rows))
        self._longest = max(self.config.data.max_seq_length, longest)
        size = self.config.train.per_device_train_batch_size
        self.model.prepare(size, bucket_length(longest, self._longest))

    def _eval_every(self, total: int) -> int:
        wanted = self.config.eval.eval_steps
        return int(wanted) if wanted >= 1 or wanted == 0 else max(1, round(total * wanted))

    def _evaluate(self, rows: list[Example], step: int, folder: RunFolder) -> float | None:
        """The mean held-out loss per label token."""
        if not rows:
            return None
        self._speed.pause()
        size = self.config.train.per_device_train_batch_size
        longest = max(self._longest, max(map(len, rows)))
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
        row = {"step": step, "eval_loss": total / count}
        folder.log(row)
        self._observer.evaluation(row)
        self._speed.resume()
        return total / count

    def _save(self, folder: RunFolder, optimizer: Optimizer, step: int) -> None:
        self._speed.pause()
        save_checkpoint(folder.checkpoint_folder(step), self.model, step, self._tokens_seen)
        folder.prune(self.config.output.save_total_limit)
        self._observer.saved(folder.checkpoint_folder(step))
        self._speed.resume()
