"""A run: it starts or resumes, does one step after the other, and finishes or is interrupted."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from qlora_wgpu.config import Config
from qlora_wgpu.data import Dataset, bucket_length
from qlora_wgpu.errors import (
    CallbackError,
    CheckpointError,
    ClusterError,
    ConfigError,
    DeviceLostError,
    OutOfMemoryError,
    TrainingError,
    WeightFileError,
    command,
    option,
)
from qlora_wgpu.model.adapter_model import AdapterModel
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.supervision.processes import SAME_WISH
from qlora_wgpu.training.batching import BatchSampler
from qlora_wgpu.training.callbacks import CallbackHandler, Step, TrainerCallback
from qlora_wgpu.training.checkpoints import BestAdapter, RunState, save_best, save_checkpoint
from qlora_wgpu.training.data import (
    SourceCounter,
    check_unpaired_balance,
    learnable,
    refuse_other_objectives,
    require_both_kinds,
)
from qlora_wgpu.training.divergence import first_plateau
from qlora_wgpu.training.evaluation import Evaluator
from qlora_wgpu.training.executor import Executor, LocalExecutor, ThroughputMeter
from qlora_wgpu.training.finish import check_ended, finish, interrupt, reopen_finished, result_of
from qlora_wgpu.training.observers import Events, Row, WorkerFigures
from qlora_wgpu.training.optimizer import Optimizer
from qlora_wgpu.training.preferences import PreferenceData, training_options
from qlora_wgpu.training.references import answers_of
from qlora_wgpu.training.result import TrainResult
from qlora_wgpu.training.run_folder import RunFingerprint, RunFolder, exclusive
from qlora_wgpu.training.samples import SampleGenerator, SampleLogger
from qlora_wgpu.training.start import (
    refuse_fewer_steps,
    reset_best_metric,
    start_or_resume,
    tell_of_length,
)
from qlora_wgpu.training.step_queue import StepQueue

_USUAL_BETA = 1e-6, 1e6


class Run:
    """A run of a model's adapter, and what its parts share."""

    model: AdapterModel  # the model, whose adapter is trained
    config: Config  # the settings
    events: Events  # tells observers
    rows: Dataset  # what is learnt
    held_out: Dataset | None  # what is measured
    plan: BatchSampler  # how the rows are cut into steps
    longest: int  # most tokens of a training row
    executor: Executor  # who computes micro-batches
    answers: PreferenceData | None  # the training data as an objective over answers reads it
    held_out_answers: PreferenceData | None  # the held-out data, likewise
    identity: RunFingerprint  # the settings, data and base that checkpoints belong to
    folder: RunFolder  # the folder that everything is written to
    state: RunState  # the figures that checkpoints keep
    best: BestAdapter | None  # the adapter with the best evaluation, where it is kept
    saved_at: int  # the step of the newest checkpoint; -1 without
    saturated: int  # values that kernels held at the end of their type, since this part began
    workers: dict[str, WorkerFigures]  # what those of a cluster did since the last row, by name
    sources: SourceCounter | None  # counts the rows of a mixture's sources
    callbacks: CallbackHandler | None  # calls the user's callbacks during the run
    result: TrainResult | None  # the figures, once it has ended

    def __init__(
        self, model: AdapterModel, config: Config, events: Events, rows: Dataset,
        held_out: Dataset | None = None, *, overwrite: bool = False, resume: bool = False,
        executor: Executor | None = None, texts: SampleGenerator | None = None,
        callbacks: Sequence[TrainerCallback] = (),
    ) -> None:  # fmt: skip
        """Begins nothing yet.

        With ``resume`` the run in ``output.dir`` goes on from its newest whole checkpoint; one that
        has none yet, and no adapter, begins again. Without an executor the model computes itself.
        """
        self.model, self.config, self.events = model, config, events
        self.rows, self.held_out = rows, held_out
        self.throughput, self.stop = ThroughputMeter(), StopRequest()
        self.best = self.sources = self.callbacks = self.result = None
        self.saved_at, self.saturated, self.workers = -1, 0, {}
        self._overwrite, self._resume = overwrite, resume
        self._executor, self._texts, self._listed = executor, texts, callbacks
        self._started: float | None = None

    # -- from its start to its end -----------------------------------------------------------------

    def train(self) -> TrainResult:
        """Does all steps."""
        for _ in self.steps():
            pass
        assert self.result is not None
        return self.result

    def steps(self) -> Iterator[Step]:
        """Does the run; a step begins when it is asked for, and who asks for no more stops it."""
        with ExitStack() as at_end:
            at_end.enter_context(exclusive(self.model, self.config.output.dir))
            self._take_data()
            optimizer = self._make_ready()
            self._open_folder(at_end)
            evaluator = Evaluator(self)
            texts = SampleLogger(self, self._texts, evaluator)
            callbacks = CallbackHandler(self, self._listed, evaluator, optimizer)
            self.callbacks = callbacks
            at_end.callback(callbacks.release)
            at_end.push(self._tell_of_replaced)
            refuse_fewer_steps(self)
            is_over = self.state.step >= self.total_steps or evaluator.has_stalled
            was_finished = self.state.finished and is_over
            if was_finished:
                reopen_finished(self)
            else:
                self._begin(evaluator, texts, callbacks)
                queue = StepQueue(self, optimizer, evaluator, texts, callbacks)
                callbacks.drain = queue.finish_all
                self.throughput.start()
                with self.stop:
                    with self._saved_on_error(queue):
                        for step in range(self.state.step + 1, self.total_steps + 1):
                            self.events.check()
                            self.stop.requested |= self.events.stop_reason is not None
                            if evaluator.has_stalled or not queue.submit(step):
                                break
                            queue.follow(step)
                            callbacks.call("on_step_end")
                            yield callbacks.present
                    queue.finish_all()
                if not self.stop.requested:
                    queue.log.check_end()
            callbacks.is_over = True
            self.read_clock()
            if self.stop.requested:
                interrupt(self)
            elif not was_finished:
                finish(self, evaluator)
            self.result = result_of(self, was_finished=was_finished)
            self.events.finished(self.result)
            failure = self.events.failure
            try:
                callbacks.call("on_train_end", self.result)
            except CallbackError as err:
                failure = failure or err
            check_ended(self, failure)

    def _take_data(self) -> None:
        """Makes sure that there is something to learn and to measure, and cuts it into steps."""
        config, size = self.config, self.model.architecture.vocab_size
        self.rows = learnable(self.rows, "train_dataset", size, "nothing would be learnt")
        if self.held_out:
            name, otherwise = "eval_dataset", "there is no loss to measure"
            self.held_out = learnable(self.held_out, name, size, otherwise)
        else:
            self.held_out = None
        refuse_other_objectives(self.rows, "train_dataset", config.train.objective)
        if self.held_out is not None:
            refuse_other_objectives(self.held_out, "eval_dataset", config.train.objective)
        check_unpaired_balance(self.rows, config.train, self.events)
        require_both_kinds(self.held_out, config)
        plateau = first_plateau(config, held_out=self.held_out is not None)
        self.state = RunState(aim=config.eval.aim, plateau=plateau)
        self.plan = BatchSampler.of(self.rows.lengths, config)
        self.longest = max(config.data.max_seq_length, self.plan.longest)

    def _make_ready(self) -> Optimizer:
        """Takes the memory of the longest step, and asks the reference where there is one."""
        model, config = self.model, self.config
        model.options = training_options(config.train, weighted=config.data.has_weights)
        model.zero_gradient()
        if self._executor is not None:
            self.executor = self._executor
        elif isinstance(model, QLoRAModel):
            self.executor = LocalExecutor(model, self.throughput)
        else:
            raise ConfigError("the model has no base weights: a Trainer takes a QLoRAModel")
        # The longest batch first, so that all memory is taken before training.
        length = bucket_length(self.plan.longest, self.longest)
        self.executor.prepare(self.plan.batch_size, length)
        optimizer = Optimizer(model, config.optim, self.total_steps)
        given = model, self.executor, config, self.events, self.longest
        self.answers = answers_of(self.rows, *given)
        self.held_out_answers = answers_of(self.held_out, *given)
        asked = None if self.answers is None else self.answers.reference_hash
        self.identity = RunFingerprint(model, config, self.rows, self.held_out, asked)
        return optimizer

    def _open_folder(self, at_end: ExitStack) -> None:
        """Takes ``output.dir``, and goes on with the run there if that is asked for."""
        path, plateau = Path(self.config.output.dir), self.state.plateau
        self.folder = RunFolder(
            path, self.config.to_yaml(),
            overwrite=self._overwrite, resume=self._resume, warn=self.events.warning,
        )  # fmt: skip
        at_end.callback(self.folder.close)
        if self._resume:
            start_or_resume(self)
        self.state.plateau = self.state.plateau or plateau

    def _begin(self, evaluator: Evaluator, texts: SampleLogger, callbacks: CallbackHandler) -> None:
        """Does what comes before the first step, or before the first that is left."""
        self.state.finished = False
        reset_best_metric(self)
        self.folder.note_steps(self.total_steps)
        self.events.started(self.total_steps, self.state.step, self.model.device.memory.by_kind)
        is_new = self.saved_at < 0
        if is_new:
            texts.keep_first()
        callbacks.call("on_train_begin")
        if is_new:
            if evaluator.is_pending:
                evaluator.measure(0)
            self.state.eval_loss_before = self.state.eval_loss
        tell_of_length(self)
        self._started = time.perf_counter() - self.state.seconds  # the time of earlier parts counts
        self.sources = SourceCounter(self.rows, self.plan)

    @contextmanager
    def _saved_on_error(self, queue: StepQueue) -> Iterator[None]:
        """While it is entered, what ends the run early leaves the steps that are done saved."""
        try:
            yield
        except GeneratorExit:  # a loop of the user's that was left: there is more to do than steps
            self.stop.requested = True
        except KeyboardInterrupt:
            if self.stop.requested:  # a second time: at once, with what is saved already
                raise
            self.stop.requested, self.stop.number = True, signal.SIGINT
        except (OutOfMemoryError, ClusterError, WeightFileError, CallbackError) as err:
            queue.finish_all()  # the device still works, and no step is half applied
            self.model.zero_gradient()
            step, told = self.state.step, f"{err}"
            if self.saved_at == step or self.save():
                told += f"; the run is saved after step {step}, and {option('resume')} goes on"
            raise type(err)(told) from (err.__cause__ or err)
        except DeviceLostError as err:  # nothing can be read any more
            if command() or self.saved_at < 0:  # a supervised command begins again by itself
                raise
            raise DeviceLostError(
                f"{err}; step-{self.saved_at} in {self.folder.checkpoints} is kept, and "
                f"{option('resume')} goes on from it"
            ) from err

    def _tell_of_replaced(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        """Tells where the run is that this one was to replace, before it learnt nothing."""
        kept = self.folder.kept_run
        if isinstance(error, TrainingError) and kept is not None:
            self.events.warning(f"the run that was to be replaced is kept in {kept}")

    # -- what its parts ask for --------------------------------------------------------------------

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.plan.total_steps

    @property
    def keeps_best(self) -> bool:
        """Whether the best adapter is kept beside the last one."""
        settings = self.config.eval
        return settings.load_best_model_at_end or settings.early_stopping_patience is not None

    def read_clock(self) -> None:
        """Notes how long all parts have taken so far."""
        if self._started is not None:
            self.state.seconds = time.perf_counter() - self._started

    def logged(self, row: Row) -> None:
        """Reports a row of logged steps."""
        self.events.step(row)
        if self.callbacks is not None:
            self.callbacks.on_log(row)

    def evaluated(self, row: Row) -> None:
        """Tells of an evaluation that is logged."""
        self.events.evaluation(row)
        if self.callbacks is not None:
            self.callbacks.on_evaluate(row)

    def wrote(self, folder: Path) -> None:
        """Tells of a checkpoint, or of the adapter."""
        self.events.saved(folder)
        if self.callbacks is not None:
            self.callbacks.on_save(folder)

    def save(self) -> bool:
        """Writes a checkpoint and removes those that are too many; False if it cannot be written.

        That does not end a run: older checkpoints stay, and the next save is another try.
        """
        step = self.state.step
        with self.throughput.paused():
            try:
                self.folder.require_own()
                self.save_best()  # a checkpoint that names it could not be gone on with rightly
                self.folder.log.flush()
                self.read_clock()
                self.state.log_digest = self.folder.log.digest
                checkpoint = self.folder.checkpoint_folder(step)
                save_checkpoint(checkpoint, self.model, self.state, self.identity.record)
            except CheckpointError as err:
                kept = f"step-{self.saved_at} is kept"
                if self.saved_at < 0:
                    kept = "no other one is there yet"
                self.events.warning(f"the state after step {step} was not saved: {err}; {kept}")
                return False
            self.saved_at = step
            self.tidy()
        self.wrote(checkpoint)
        return True

    def save_best(self) -> None:
        """Writes the best adapter into its folder, if it is not there."""
        if self.best is not None and not self.best.is_saved:
            self.folder.require_own()
            self.best = save_best(self.folder.best, self.model, self.best)

    def tidy(self) -> None:
        """Removes what a new checkpoint or adapter has made superfluous; what stays is no harm."""
        try:
            self.folder.forget_replaced()
            self.folder.prune(self.config.output.save_total_limit)
        except CheckpointError as err:
            self.events.warning(f"{err}; it does no harm there")

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


# ---- the wish that a run ends early -------------------------------------------------------------

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has not all of them
_SIGNALS = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]


class StopRequest:
    """Ctrl-C, SIGTERM and a closed terminal as a wish, granted between two micro-batches.

    While it is entered, the first signal is noted; the second does what it always does. Those that
    come together are one.
    """

    def __init__(self) -> None:
        """Nothing is asked for yet."""
        self.requested = False  # whether somebody asked
        self.number: int | None = None  # the signal that did; None where it was none
        self._since = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        """Takes over the signals, where Python lets it: in the main thread.

        Those that are ignored stay so, as with nohup.
        """
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is signal.SIG_IGN:
                    continue
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Gives the signals back."""
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.requested, self.number, self._since = True, number, time.monotonic()
        elif time.monotonic() - self._since > SAME_WISH:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
