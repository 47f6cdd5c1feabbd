"""A run: it starts or resumes, computes its steps, and finishes or is interrupted."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
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
    QLoRAError,
    RewardError,
    TrainingError,
    WeightFileError,
    command,
    option,
)
from qlora_wgpu.model.adapter_model import AdapterModel
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.supervision.processes import DEBOUNCE_SECONDS
from qlora_wgpu.training.batching import BatchSampler
from qlora_wgpu.training.callbacks import CallbackHandler, Step, TrainerCallback
from qlora_wgpu.training.checkpoints import BestAdapter, RunState, save_best, save_checkpoint
from qlora_wgpu.training.data import (
    SourceCounter,
    as_dataset,
    check_unpaired_balance,
    refuse_other_objectives,
    require_both_kinds,
    require_labels,
)
from qlora_wgpu.training.evaluation import Evaluator, SampleGenerator, SampleLogger
from qlora_wgpu.training.executor import Executor, LocalExecutor, ThroughputMeter
from qlora_wgpu.training.finish import check_ended, finish, interrupt, reopen_finished, result_of
from qlora_wgpu.training.images import BatchImages, Features
from qlora_wgpu.training.observers import Events, Row, TrainResult, WorkerMetrics
from qlora_wgpu.training.optimizer import Optimizer, first_plateau
from qlora_wgpu.training.policies import (
    RolloutPlan,
    Rollouts,
    policy_of,
    refuse_long_completions,
)
from qlora_wgpu.training.preferences import PreferenceData, preference_of, training_options
from qlora_wgpu.training.references import answers_of
from qlora_wgpu.training.run_folder import RunFingerprint, RunFolder, exclusive
from qlora_wgpu.training.scoring import ScoredData, check_head
from qlora_wgpu.training.start import (
    check_resumable,
    load_run,
    note_total_steps,
    refuse_fewer_steps,
    reset_best_metric,
)
from qlora_wgpu.training.step_queue import StepQueue

_USUAL_BETA = 1e-6, 1e6


class Run:
    """The training of a model's adapter, and the state that its parts share."""

    model: AdapterModel  # the model whose adapter is trained
    config: Config  # the settings
    events: Events  # passes events to observers
    rows: Dataset  # the training data
    held_out: Dataset | None  # the evaluation data
    plan: BatchSampler | RolloutPlan  # how the training data is divided into steps
    longest: int  # maximum number of tokens of a training row
    executor: Executor  # computes micro-batches
    # The training and evaluation data of objectives over answers or sequences
    answers: PreferenceData | ScoredData | None
    held_out_answers: PreferenceData | ScoredData | None
    rollouts: Rollouts | None  # samples and scores the completions of GRPO and RLOO
    identity: RunFingerprint  # the settings, data and base that checkpoints must match
    folder: RunFolder  # the folder that everything is written to
    state: RunState  # the state that checkpoints store
    best: BestAdapter | None  # the adapter with the best evaluation, if it is kept
    saved_at: int  # the step of the newest checkpoint, or -1
    saturated: int  # number of clamped values since the run started or resumed
    workers: dict[str, WorkerMetrics]  # of cluster workers since the last logged step, by name
    sources: SourceCounter | None  # counts the rows of a mixture's sources
    callbacks: CallbackHandler | None  # calls the user's callbacks during the run
    result: TrainResult | None  # the result, after the end

    def __init__(
        self, model: AdapterModel, config: Config, events: Events, rows: Dataset,
        held_out: Dataset | None = None, *, overwrite: bool = False, resume: bool = False,
        executor: Executor | None = None, texts: SampleGenerator | None = None,
        callbacks: Sequence[TrainerCallback] = (), features: Features | None = None,
        rollouts: Callable[[Run], Rollouts] | None = None,
    ) -> None:  # fmt: skip
        """Starts nothing yet.

        With ``resume`` the run in ``output.dir`` continues from its newest complete checkpoint; one
        without checkpoints and adapter starts again. The default executor is the model's device.
        If rows have images, ``features`` must have those of all.
        """
        self.model, self.config, self.events = model, config, events
        self.rows, self.held_out = rows, held_out
        self.throughput, self.stop = ThroughputMeter(), StopRequest()
        self.best = self.sources = self.callbacks = self.result = self.rollouts = None
        self._opens_rollouts = rollouts
        self.saved_at, self.saturated, self.workers = -1, 0, {}
        self._overwrite, self._resume = overwrite, resume
        self._executor, self._texts, self._listed = executor, texts, callbacks
        self.images = None if features is None else BatchImages(features, model.architecture)
        self._started: float | None = None

    # -- from start to end -------------------------------------------------------------------------

    def train(self) -> TrainResult:
        """Runs all steps."""
        for _ in self.steps():
            pass
        assert self.result is not None
        return self.result

    def steps(self) -> Iterator[Step]:
        """Runs step by step: each starts on request, and leaving the loop stops the run."""
        with ExitStack() as at_end:
            at_end.enter_context(exclusive(self.model, self.config.output.dir))
            self._check_data()
            optimizer = self._prepare()
            if self.rollouts is not None:
                at_end.callback(self.rollouts.close)
            self._open_folder(at_end)
            evaluator = Evaluator(self)
            texts = SampleLogger(self, self._texts, evaluator)
            callbacks = CallbackHandler(self, self._listed, evaluator, optimizer)
            self.callbacks = callbacks
            at_end.callback(callbacks.release)
            at_end.push(self._warn_of_replaced)
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
            try:
                if self.stop.requested:
                    interrupt(self)
                elif not was_finished:
                    finish(self, evaluator)
            except CallbackError as err:
                raise self._saved_error(err) from (err.__cause__ or err)
            self.result = result_of(self, was_finished=was_finished)
            self.events.finished(self.result)
            failure = self.events.failure
            try:
                callbacks.call("on_train_end", self.result)
            except CallbackError as err:
                failure = failure or err
            check_ended(self, failure)

    def _check_data(self) -> None:
        """Checks the data for labels and the objective, and divides it into steps."""
        config, size = self.config, self.model.architecture.vocab_size
        if policy_of(config) is not None:
            self._check_prompts(size)
            return
        self.rows = require_labels(self.rows, "train_dataset", size, "nothing to train on")
        if self.held_out:
            name, consequence = "eval_dataset", "there is no loss to measure"
            self.held_out = require_labels(self.held_out, name, size, consequence)
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

    def _check_prompts(self, vocabulary: int) -> None:
        """Checks the prompts of GRPO and RLOO, and divides them into generations and steps."""
        config = self.config
        self.rows = as_dataset(self.rows, "train_dataset", vocabulary)
        refuse_other_objectives(self.rows, "train_dataset", config.train.objective)
        if self.held_out is not None:
            self.held_out = as_dataset(self.held_out, "eval_dataset", vocabulary)
            refuse_other_objectives(self.held_out, "eval_dataset", config.train.objective)
        plateau = first_plateau(config, held_out=self.held_out is not None)
        self.state = RunState(aim=config.eval.aim, plateau=plateau)
        self.plan = RolloutPlan.of(self.rows.lengths, config)
        refuse_long_completions(config, self.rows, self.held_out, self.model.folder.config)
        self.longest = max(config.data.max_seq_length, self.plan.longest)

    def _prepare(self) -> Optimizer:
        """Allocates the longest step, and computes the reference model if there is one."""
        model, config = self.model, self.config
        check_head(config.train, model.architecture.classes)
        model.options = training_options(
            config.train, weighted=config.data.has_weights, policy=policy_of(config)
        )
        model.zero_gradient()
        if self._executor is not None:
            self.executor = self._executor
        elif isinstance(model, QLoRAModel):
            self.executor = LocalExecutor(model, self.throughput, images=self.images is not None)
        else:
            raise ConfigError("the model has no base weights: a Trainer requires a QLoRAModel")
        # The longest batch first, so that all memory is allocated before training.
        length = bucket_length(self.plan.longest, self.longest)
        self.executor.prepare(self.plan.batch_size, length)
        optimizer = Optimizer(model, config.optim, self.total_steps)
        given = model, self.executor, config, self.events, self.longest, self.images
        if isinstance(self.plan, RolloutPlan):
            self.rollouts = self._sampled_by()
        self.answers = answers_of(self.rows, *given)
        self.held_out_answers = answers_of(self.held_out, *given)
        reference = None if self.answers is None else self.answers.reference_hash
        self.identity = RunFingerprint(model, config, self.rows, self.held_out, reference)
        return optimizer

    def _sampled_by(self) -> Rollouts:
        if self._opens_rollouts is None:
            raise ConfigError(
                f"train.objective: {self.config.train.objective} needs reward functions: use "
                "qlora_wgpu.Trainer or qlora_wgpu.train"
            )
        return self._opens_rollouts(self)

    def _open_folder(self, at_end: ExitStack) -> None:
        """Locks ``output.dir``, and resumes the run there if requested."""
        path, plateau = Path(self.config.output.dir), self.state.plateau
        self.folder = RunFolder(
            path, self.config.to_yaml(),
            overwrite=self._overwrite, resume=self._resume, warn=self.events.warning,
        )  # fmt: skip
        at_end.callback(self.folder.close)
        if self._resume and check_resumable(path, self.config):
            load_run(self)
        elif self._resume:
            self.folder.begin(self.config.to_yaml())
        self.state.plateau = self.state.plateau or plateau

    def _begin(self, evaluator: Evaluator, texts: SampleLogger, callbacks: CallbackHandler) -> None:
        """Does what comes before the first step of a new or resumed run."""
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
        note_total_steps(self)
        self._started = time.perf_counter() - self.state.seconds  # with earlier parts
        self.sources = SourceCounter(self.rows, self.plan)

    @contextmanager
    def _saved_on_error(self, queue: StepQueue) -> Iterator[None]:
        """While it is entered, whatever ends the run early saves the finished steps."""
        try:
            yield
        except GeneratorExit:  # the user left the loop: the run must be saved
            self.stop.requested = True
        except KeyboardInterrupt:
            if self.stop.requested:  # the second time: end at once
                raise
            self.stop.requested, self.stop.number = True, signal.SIGINT
        except (
            OutOfMemoryError, ClusterError, WeightFileError, CallbackError, RewardError,
        ) as err:  # fmt: skip
            queue.finish_all()  # the device still works, and no step is partly applied
            self.model.zero_gradient()
            raise self._saved_error(err) from (err.__cause__ or err)
        except DeviceLostError as err:  # nothing can be read any more
            if command() or self.saved_at < 0:  # a supervised command restarts by itself
                raise
            raise DeviceLostError(
                f"{err}; step-{self.saved_at} in {self.folder.checkpoints} is kept: "
                f"{option('resume')} continues from it"
            ) from err

    def _saved_error(self, err: QLoRAError) -> QLoRAError:
        """An error that ends a run, after its state was saved; says so."""
        step, message = self.state.step, f"{err}"
        if self.saved_at == step or self.save():
            message += f"; the run is saved after step {step}: {option('resume')} continues it"
        return type(err)(message)

    def _warn_of_replaced(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        """Says where the run is that this one should have replaced, if it has failed."""
        kept = self.folder.kept_run
        if isinstance(error, TrainingError) and kept is not None:
            self.events.warning(f"the run that would have been replaced is kept in {kept}")

    # -- shared by its parts -----------------------------------------------------------------------

    @property
    def total_steps(self) -> int:
        """The number of steps of the whole run."""
        return self.plan.total_steps

    @property
    def keeps_best(self) -> bool:
        """Whether the best adapter is kept in addition to the last one."""
        settings = self.config.eval
        return settings.load_best_model_at_end or settings.early_stopping_patience is not None

    def read_clock(self) -> None:
        """Updates the time that the run has taken so far."""
        if self._started is not None:
            self.state.seconds = time.perf_counter() - self._started

    def logged(self, row: Row) -> None:
        """Reports a row of logged steps."""
        self.events.step(row)
        if self.callbacks is not None:
            self.callbacks.on_log(row)

    def evaluated(self, row: Row) -> None:
        """Passes a logged evaluation to observers and callbacks."""
        self.events.evaluation(row)
        if self.callbacks is not None:
            self.callbacks.on_evaluate(row)

    def wrote(self, folder: Path) -> None:
        """Passes the folder of a checkpoint or of the adapter to observers and callbacks."""
        self.events.saved(folder)
        if self.callbacks is not None:
            self.callbacks.on_save(folder)

    def save(self) -> bool:
        """Writes a checkpoint and removes old ones; False, with a warning, if it cannot be written.

        A failure does not end the run: older checkpoints are kept, and the next save tries again.
        """
        step = self.state.step
        with self.throughput.paused():
            try:
                self.folder.require_own()
                self.save_best()  # a checkpoint without it could not be resumed correctly
                self.folder.log.flush()
                self.read_clock()
                self.state.log_digest = self.folder.log.digest
                checkpoint = self.folder.checkpoint_folder(step)
                rollout = None if self.rollouts is None else self.rollouts.tensors(step)
                save_checkpoint(checkpoint, self.model, self.state, self.identity.record, rollout)
            except CheckpointError as err:
                kept = f"step-{self.saved_at} is kept"
                if self.saved_at < 0:
                    kept = "there is no other checkpoint yet"
                self.events.warning(f"the state after step {step} was not saved: {err}; {kept}")
                return False
            self.saved_at = step
            self.tidy()
        self.wrote(checkpoint)
        return True

    def save_best(self) -> None:
        """Writes the best adapter into its folder, unless it was already written."""
        if self.best is not None and not self.best.is_saved:
            self.folder.require_own()
            self.best = save_best(self.folder.best, self.model, self.best)

    def tidy(self) -> None:
        """Removes what a new checkpoint or adapter makes obsolete; a failure is only a warning."""
        try:
            self.folder.backup.remove()
            self.folder.prune(self.config.output.save_total_limit)
        except CheckpointError as err:
            self.events.warning(f"{err}; it can stay there")

    def failure(self, what: str) -> TrainingError:
        """The error that ends a run whose training has failed."""
        return TrainingError(
            f"{what}; the checkpoints in {self.folder.checkpoints} are kept: try a lower "
            "optim.learning_rate or more warm-up"
        )

    def failure_at_start(self, what: str) -> TrainingError:
        """The error that ends a run before its first update, whatever its learning rate."""
        train = self.config.train
        cause = (
            "the base, or the adapter of lora.init_from, produces values that are too large; try "
            "train.compute_dtype: float32, or another base"
        )
        if preference_of(train) is not None and not _USUAL_BETA[0] <= train.beta <= _USUAL_BETA[1]:
            cause = f"train.beta is {train.beta:g}; set it closer to 0.1, the default"
        return TrainingError(f"{what}, before the first update: {cause}")


# ---- signals -------------------------------------------------------------------------------------

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has not all of them
_SIGNALS = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]


class StopRequest:
    """A request to stop by Ctrl-C, SIGTERM or a closed terminal, met between two micro-batches.

    While it is entered, the first signal sets ``requested``, and the second has its usual effect.
    Signals that come together count as one.
    """

    def __init__(self) -> None:
        self.requested = False  # whether the run should stop
        self.number: int | None = None  # the signal that requested it, if any
        self._since = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        """Installs signal handlers, in the main thread only.

        Ignored signals stay ignored, as with nohup.
        """
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is signal.SIG_IGN:
                    continue
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.requested, self.number, self._since = True, number, time.monotonic()
        elif time.monotonic() - self._since > DEBOUNCE_SECONDS:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
