"""The training loop: micro-batches are summed on the device, and updated from once a step.

Nothing is read back inside a step but a few bytes for the log, and those one step late.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np

from qlora_wgpu.data import Dataset, Example
from qlora_wgpu.errors import (
    CallbackError,
    ClusterError,
    DeviceLostError,
    OutOfMemoryError,
    WeightFileError,
    command,
    option,
)
from qlora_wgpu.gpu.timing import Readback
from qlora_wgpu.graph.host_callbacks import DiskReadStats
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.training.batching import BatchPlan, padded_batch, weight_unit
from qlora_wgpu.training.computing import MicroBatch
from qlora_wgpu.training.evaluation import Evaluator, no_gain
from qlora_wgpu.training.optimizer import Optimizer
from qlora_wgpu.training.preferences import Answers
from qlora_wgpu.training.run import Run
from qlora_wgpu.training.samples import TextWriter
from qlora_wgpu.training.steering import Steering, Step
from qlora_wgpu.training.step_log import StepLog, SubmittedStep
from qlora_wgpu.training.stopping import StopRequest

# ---- waiting for the disk ------------------------------------------------------------------------

_SHARE = 0.5  # of the time: what is told from there on
_STEPS, _SECONDS = 3, 10.0  # the least that is looked at


class DiskWatch:
    """Compares what was waited for with what time has passed; tells of it once."""

    def __init__(
        self, reading: DiskReadStats, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Has seen no step yet."""
        self._reading, self._clock = reading, clock
        self._steps = -1  # the first one finds files that nobody has read before
        self._begin = self._bytes = self._waited = 0.0
        self._is_told = False

    def after_step(self) -> str:
        """A sentence, once enough steps have waited for the disk; else empty."""
        if self._is_told or not self._reading.nbytes:
            return ""
        self._steps += 1
        if not self._steps:
            self._begin = self._clock()
            self._bytes, self._waited = self._reading.nbytes, self._reading.seconds
            return ""
        passed, waited = self._clock() - self._begin, self._reading.seconds - self._waited
        if self._steps < _STEPS or passed < _SECONDS or waited < _SHARE * passed:
            return ""
        self._is_told = True
        nbytes = self._reading.nbytes - self._bytes
        return (
            f"steps wait for the disk {waited / passed:.0%} of their time: "
            f"{nbytes / self._steps / 1e9:,.2g} GB of weights a step are read from "
            f"{Path(self._reading.path).parent} at {nbytes / waited / 1e6:,.0f} MB/s; put them on "
            "a faster disk, end programs that take host memory, which would keep them, or raise "
            "device.memory"
        )


# ---- the loop ------------------------------------------------------------------------------------

_Error = TypeVar("_Error", bound=OutOfMemoryError | ClusterError | WeightFileError | CallbackError)


class TrainingLoop:
    """All steps of a run that are left."""

    def __init__(
        self,
        run: Run,
        rows: Dataset,
        plan: BatchPlan,
        optimizer: Optimizer,
        evaluator: Evaluator,
        texts: TextWriter,
        steering: Steering,
    ) -> None:
        """Takes the parts of a run; its first step follows the state's."""
        self._run = run
        self._rows = rows
        self._plan = plan
        self._optimizer = optimizer
        self._evaluator = evaluator
        self._texts = texts
        self._steering = steering
        steering.drain = self._finish_all
        self._log = StepLog(run)
        self._readback = Readback(run.model.device, *run.model.stats_window)
        self._submitted: deque[tuple[SubmittedStep, Step]] = deque()
        self._stop = StopRequest()
        self._disk = DiskWatch(run.model.programs.traffic.reading)

    def steps(self) -> Iterator[Step]:
        """Does the steps, each when it is asked for; who asks for no more stops the run."""
        self._run.throughput.start()
        with self._stop as stop:
            try:
                yield from self._do_steps(stop)
            except GeneratorExit:
                stop.requested = True
                self._finish_all()
                raise
            except KeyboardInterrupt:
                if stop.requested:  # a second time: at once, with what is saved already
                    raise
                stop.requested, stop.number = True, signal.SIGINT
            except (OutOfMemoryError, ClusterError, WeightFileError, CallbackError) as err:
                raise self._saved_after(err) from (err.__cause__ or err)
            except DeviceLostError as err:
                raise self._kept_before(err) from err
            self._finish_all()
        if not stop.requested:
            self._log.check_end()

    @property
    def is_stopped(self) -> bool:
        """Whether somebody stopped it."""
        return self._stop.requested

    @property
    def stop_signal(self) -> int | None:
        """The signal that stopped it, if one did."""
        return self._stop.number

    def _saved_after(self, error: _Error) -> _Error:
        """Saves the steps that are done; the device still works, and no step is half applied."""
        self._finish_all()
        self._run.model.zero_gradient()
        step = self._run.state.step
        if self._run.saved_at != step and not self._run.save():
            return error
        return type(error)(
            f"{error}; the run is saved after step {step}, and {option('resume')} goes on"
        )

    def _kept_before(self, error: DeviceLostError) -> DeviceLostError:
        """Nothing can be read any more, but what was saved is whole."""
        step = self._run.saved_at
        if command() or step < 0:  # a supervised command begins again by itself
            return error
        return DeviceLostError(
            f"{error}; step-{step} in {self._run.folder.checkpoints} is kept, and "
            f"{option('resume')} goes on from it"
        )

    def _do_steps(self, stop: StopRequest) -> Iterator[Step]:
        """Does them until the last, or one that stops the run."""
        for step in range(self._run.state.step + 1, self._plan.total_steps + 1):
            self._run.observer.check()
            stop.requested |= self._run.observer.stop_reason is not None
            if self._evaluator.has_stalled or not self._submit(step, stop):
                return
            self._follow(step, stop)
            if text := self._disk.after_step():
                self._run.observer.warning(text)
            self._steering.stepped()
            yield self._steering.present

    def _submit(self, step: int, stop: StopRequest) -> bool:
        """Queues a step; False if it was stopped before its end."""
        unit = self._weight_unit(step)
        tokens = self._submit_blocks(step, stop, unit)
        if tokens is None:
            return False
        if (plateau := self._run.state.plateau) is not None:
            self._optimizer.hold(plateau.rate)
        self._optimizer.multiply(self._run.state.rate_factor)
        self._optimizer.step(step)
        self._readback.request()
        self._run.model.zero_stats()
        workers = self._run.computing.figures()
        rate = self._optimizer.rate(step)
        self._steering.submitted(step, rate)
        waiting = SubmittedStep(step, rate, tokens, workers, unit), self._steering.present
        self._submitted.append(waiting)
        return True

    def _follow(self, step: int, stop: StopRequest) -> None:
        """Does what is due after a step; after the last one, that is left to the run's end."""
        ends = step == self._plan.total_steps
        evaluates = self._evaluator.is_due(step) and not ends
        saves = step % self._run.config.output.save_steps == 0 and not ends
        writes = self._texts.is_due(step) and not ends
        # One step stays on its way unless somebody needs the device's state now.
        while self._submitted and (self._readback.full or evaluates or saves or writes):
            self._finish_oldest()
        if evaluates:
            self._evaluator.measure(step)
        if writes:
            self._texts.write(step, stop)
        if self._evaluator.has_stalled:
            self._run.observer.warning(
                f"stopped early after step {step}: {no_gain(self._run.config.eval)}, in "
                f"{self._run.state.without_gain} evaluations"
            )
        elif saves:
            self._run.save()

    def _finish_oldest(self) -> None:
        submitted, step = self._submitted.popleft()
        step.take(self._log.finish(submitted, self._readback.take()))

    def _finish_all(self) -> None:
        while self._submitted:
            self._finish_oldest()

    def _weight_unit(self, step: int) -> float:
        """What a step's weights are counted in."""
        if not self._run.config.data.has_weights or self._run.answers is not None:
            return 1.0
        blocks = self._plan.blocks(step - 1)
        return weight_unit(self._rows[i] for block in blocks for row in block for i in row)

    def _submit_blocks(self, step: int, stop: StopRequest, unit: float) -> int | None:
        """Queues a step's micro-batches; the number of its tokens, or None if it was stopped."""
        tokens, labels = 0, 0
        is_cut = False

        def blocks() -> Iterator[MicroBatch]:
            nonlocal tokens, labels, is_cut
            if self._run.answers is not None:
                for block in self._answer_blocks(step, self._run.answers):
                    if stop.requested:
                        is_cut = True
                        return
                    tokens += 0 if block.is_measured else block.tokens
                    labels += 1
                    yield block
                return
            for index, chosen in enumerate(self._plan.blocks(step - 1)):
                if stop.requested:
                    is_cut = True
                    return
                examples = [[self._rows[i] for i in row] for row in chosen]
                block = self._micro_batch(step, index, examples, unit)
                tokens += block.tokens
                if any(e.num_label_tokens for row in examples for e in row):
                    labels += int((block.targets != IGNORE_INDEX).sum())
                    yield block

        done = self._run.computing.accumulate(blocks(), lambda: stop.requested)
        if is_cut or not done:
            return None
        if not labels:
            self._run.observer.warning(
                f"step {step}: none of its rows has a label, so nothing was updated"
            )
        return tokens

    def _answer_blocks(self, step: int, answers: Answers) -> Iterator[MicroBatch]:
        """The micro-batches of a step over answers; what only measures them drops nothing out."""
        model, blocks = self._run.model, self._plan.blocks(step - 1)
        learnt = 0
        for made in answers.batches(blocks, self._plan.batch_size):
            is_learnt = made.kind == "loss"
            is_random = model.is_random and is_learnt
            key = self._plan.dropout_key(step, learnt) if is_random else None
            yield MicroBatch.of_answers(model, made, key)
            learnt += is_learnt

    def _micro_batch(
        self, step: int, index: int, rows: list[list[Example]], unit: float
    ) -> MicroBatch:
        """A micro-batch of a step, packed and checked, its weights in units."""
        model, plan = self._run.model, self._plan
        has_weights = self._run.config.data.has_weights
        batch = padded_batch(rows, plan.batch_size, self._run.longest)
        return MicroBatch(
            *model.checked(batch.input_ids, batch.labels, batch.attention_mask),
            dropout_key=plan.dropout_key(step, index) if model.is_random else None,
            tokens=sum(len(e) for row in rows for e in row),
            weights=batch.weights / np.float32(unit) if has_weights else None,
        )
