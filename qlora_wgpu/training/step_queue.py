"""The queue of steps: micro-batches are summed up on the device, then the adapter is updated.

Only a few bytes of metrics are read back, one step late.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from qlora_wgpu.gpu.timing import Readback
from qlora_wgpu.graph.host_callbacks import DiskReadStats
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.training.batching import BatchSampler, padded_batch, weight_unit
from qlora_wgpu.training.callbacks import CallbackHandler, Step
from qlora_wgpu.training.evaluation import Evaluator, SampleLogger, plateau_message
from qlora_wgpu.training.executor import MicroBatch
from qlora_wgpu.training.optimizer import Optimizer
from qlora_wgpu.training.policies import RolloutPlan
from qlora_wgpu.training.preferences import PreferenceData
from qlora_wgpu.training.scoring import ScoredData
from qlora_wgpu.training.step_log import MetricsLogger, SubmittedStep

if TYPE_CHECKING:
    from qlora_wgpu.training.run import Run

# ---- slow disks ----------------------------------------------------------------------------------

_SHARE = 0.5  # of the time, above which waiting for the disk is reported
_STEPS, _SECONDS = 3, 10.0  # the minimum that is measured


class IOStallMonitor:
    """Measures how much of the time steps wait for the disk; reports it once."""

    def __init__(
        self, reading: DiskReadStats, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._reading, self._clock = reading, clock
        self._steps = -1  # the first one reads files that are not cached
        self._begin = self._bytes = self._waited = 0.0
        self._is_reported = False

    def after_step(self) -> str:
        """A warning, once enough steps have waited for the disk; otherwise empty."""
        if self._is_reported or not self._reading.nbytes:
            return ""
        self._steps += 1
        if not self._steps:
            self._begin = self._clock()
            self._bytes, self._waited = self._reading.nbytes, self._reading.seconds
            return ""
        passed, waited = self._clock() - self._begin, self._reading.seconds - self._waited
        if self._steps < _STEPS or passed < _SECONDS or waited < _SHARE * passed:
            return ""
        self._is_reported = True
        nbytes = self._reading.nbytes - self._bytes
        return (
            f"steps wait for the disk {waited / passed:.0%} of the time: "
            f"{nbytes / self._steps / 1e9:,.2g} GB of weights per step are read from "
            f"{Path(self._reading.path).parent} at {nbytes / waited / 1e6:,.0f} MB/s; put them on "
            "a faster disk, end programs that use the memory in which they would be cached, or "
            "raise device.memory"
        )


# ---- steps ---------------------------------------------------------------------------------------


class StepQueue:
    """Queues a run's steps, and processes their metrics when these have arrived."""

    def __init__(
        self, run: Run, optimizer: Optimizer, evaluator: Evaluator, texts: SampleLogger,
        callbacks: CallbackHandler,
    ) -> None:  # fmt: skip
        self._run = run
        self._optimizer = optimizer
        self._evaluator = evaluator
        self._texts = texts
        self._callbacks = callbacks
        self.log = MetricsLogger(run)
        self._readback = Readback(run.model.device, *run.model.stats_window)
        self._submitted: deque[tuple[SubmittedStep, Step]] = deque()
        self._disk = IOStallMonitor(run.model.programs.traffic.reading)

    def submit(self, step: int) -> bool:
        """Queues a step; False if the run was stopped before its end."""
        run = self._run
        if run.rollouts is not None and not run.rollouts.begin(step):
            return False
        unit = self._weight_unit(step)
        tokens = self._submit_micro_batches(step, unit)
        if tokens is None:
            return False
        schedule = self._optimizer.schedule
        if run.state.plateau is not None:
            schedule.fixed_rate = run.state.plateau.rate
        schedule.factor = run.state.rate_factor
        self._optimizer.step(step)
        self._readback.request()
        run.model.zero_stats()
        rate, workers = schedule.rate(step), run.executor.worker_metrics()
        self._callbacks.submitted(step, rate)
        submitted = SubmittedStep(step, rate, tokens, workers, unit)
        self._submitted.append((submitted, self._callbacks.present))
        return True

    def follow(self, step: int) -> None:
        """Evaluates, generates and saves what is due after a step, unless it is the last one."""
        run, ends = self._run, step == self._run.total_steps
        evaluates = self._evaluator.is_due(step) and not ends
        saves = step % run.config.output.save_steps == 0 and not ends
        writes = self._texts.is_due(step) and not ends
        # One step stays queued unless the device's state is needed now.
        while self._submitted and (self._readback.full or evaluates or saves or writes):
            self._finish_oldest()
        if evaluates:
            self._evaluator.measure(step)
        if writes:
            self._texts.write(step)
        if self._evaluator.has_stalled:
            run.events.warning(
                f"stopped early after step {step}: {plateau_message(run.config.eval)}, for "
                f"{run.state.without_gain} evaluations"
            )
        elif saves:
            run.save()
        if text := self._disk.after_step():
            run.events.warning(text)

    def _finish_oldest(self) -> None:
        submitted, step = self._submitted.popleft()
        step.take(self.log.finish(submitted, self._readback.take()))

    def finish_all(self) -> None:
        """Waits for all queued steps."""
        while self._submitted:
            self._finish_oldest()

    def _weight_unit(self, step: int) -> float:
        """The divisor of a step's weights."""
        plan = self._run.plan
        if not self._run.config.data.has_weights or isinstance(plan, RolloutPlan):
            return 1.0
        if self._run.answers is not None:
            return 1.0
        blocks = plan.blocks(step - 1)
        return weight_unit(self._run.rows[i] for block in blocks for row in block for i in row)

    def _submit_micro_batches(self, step: int, unit: float) -> int | None:
        """Queues a step's micro-batches; its number of tokens, or None if the run was stopped."""
        run, stop = self._run, self._run.stop
        tokens, labels = 0, 0
        is_cut = False

        def blocks() -> Iterator[MicroBatch]:
            nonlocal tokens, labels, is_cut
            made = self._micro_batches(step, unit)
            if run.answers is not None:
                made = self._answer_blocks(step, run.answers)
            if run.rollouts is not None:
                made = iter(run.rollouts.batches(step))
            for block in made:
                if stop.requested:
                    is_cut = True
                    return
                tokens += 0 if block.is_measured else block.tokens
                count = 1 if run.answers is not None else (block.targets != IGNORE_INDEX).sum()
                labels += int(count)
                if count:
                    yield block

        done = run.executor.accumulate(blocks(), lambda: stop.requested)
        if is_cut or not done:
            return None
        if not labels:
            what = "rows has labels" if run.rollouts is None else "completions has a loss"
            run.events.warning(f"step {step}: none of its {what}, so nothing was updated")
        return tokens

    def _answer_blocks(
        self, step: int, answers: PreferenceData | ScoredData
    ) -> Iterator[MicroBatch]:
        """The micro-batches of answers or sequences; dropout is only used for the loss."""
        model, plan = self._run.model, self._run.plan
        assert isinstance(plan, BatchSampler)
        index = 0
        for batch in answers.batches(plan.blocks(step - 1), plan.batch_size):
            is_loss = batch.kind == "loss"
            key = plan.dropout_key(step, index) if model.is_random and is_loss else None
            yield MicroBatch.of_answers(model, batch, key)
            index += is_loss

    def _micro_batches(self, step: int, unit: float) -> Iterator[MicroBatch]:
        """The micro-batches of a supervised step; weights are divided by ``unit``."""
        run, model, plan = self._run, self._run.model, self._run.plan
        assert isinstance(plan, BatchSampler)
        has_weights = run.config.data.has_weights
        for index, chosen in enumerate(plan.blocks(step - 1)):
            rows = [[run.rows[i] for i in row] for row in chosen]
            batch = padded_batch(rows, plan.batch_size, run.longest)
            ids, targets, mask = model.checked(batch.input_ids, batch.labels, batch.attention_mask)
            yield MicroBatch(
                ids, targets, mask,
                dropout_key=plan.dropout_key(step, index) if model.is_random else None,
                tokens=sum(len(e) for row in rows for e in row),
                weights=batch.weights / np.float32(unit) if has_weights else None,
                images=None if run.images is None else run.images(rows, ids, mask),
            )  # fmt: skip
