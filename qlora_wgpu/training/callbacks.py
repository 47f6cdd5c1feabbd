"""``TrainerCallback``, which watches and steers a run, and the ``Step`` that it gets."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qlora_wgpu.errors import (
    ClusterError,
    ConfigError,
    DeviceError,
    TrainingError,
    WeightFileError,
    brief,
)
from qlora_wgpu.limits import LEARNING_RATES
from qlora_wgpu.model.adapter_model import AdapterModel
from qlora_wgpu.training.evaluation import Evaluator
from qlora_wgpu.training.observers import EventRows, Events, Row, TrainResult, failure_of
from qlora_wgpu.training.optimizer import Optimizer
from qlora_wgpu.training.step_log import StepMetrics

if TYPE_CHECKING:
    from qlora_wgpu.training.run import Run


class Step:
    """A finished step, and the actions available before the next one.

    Attributes:
        step: Its number; 0 before the first.
        total_steps: The number of steps of the whole run.
        learning_rate: The learning rate of this step.
        saved: In ``on_save``, the folder that was written: a checkpoint or the final adapter.
    """

    def __init__(self, handler: CallbackHandler, step: int, learning_rate: float) -> None:
        self.step = step
        self.total_steps = handler.run.total_steps
        self.learning_rate = learning_rate
        self.saved: Path | None = None
        self._handler = handler
        self._metrics: StepMetrics | None = None

    def __repr__(self) -> str:
        return f"Step({self.step} of {self.total_steps})"

    def take(self, metrics: StepMetrics) -> None:
        """Stores the step's metrics, once they have arrived from the device."""
        self._metrics = metrics

    @property
    def model(self) -> AdapterModel:
        """The model after this step."""
        return self._handler.run.model

    @property
    def loss(self) -> float | None:
        """Mean loss of its label tokens; waits for the device. None before the first step."""
        return self._arrived().loss

    @property
    def mean_token_accuracy(self) -> float | None:
        """Share of its label tokens that were the most likely ones; waits for the device."""
        return self._arrived().accuracy

    @property
    def grad_norm(self) -> float | None:
        """Norm of its gradient before clipping; waits for the device."""
        return self._arrived().norm

    @property
    def eval_loss(self) -> float | None:
        """The latest held-out loss; None before the first evaluation."""
        return self._handler.run.state.eval_loss

    @property
    def eval_mean_token_accuracy(self) -> float | None:
        """The token accuracy of the latest evaluation."""
        return self._handler.latest.get("eval_mean_token_accuracy")

    @property
    def eval_metrics(self) -> dict[str, Any]:
        """All metrics of the latest evaluation, as in metrics.jsonl; empty before the first."""
        return dict(self._handler.latest)

    def stop(self, reason: str = "a callback stopped it") -> None:
        """Ends the run after this step and saves its state.

        Args:
            reason: Becomes ``TrainResult.stop_reason``.
        """
        self._require_latest()
        self._handler.run.events.stop_run(reason)

    def evaluate(self) -> float:
        """Measures and logs the held-out loss of the current model, at most once per step.

        Raises:
            ConfigError: If the run has no held-out data.
        """
        run = self._settled()
        if run.state.eval_step != run.state.step:
            self._handler.evaluator.measure(run.state.step)
        if run.state.eval_loss is None:
            raise ConfigError("the run has no held-out data to evaluate on")
        return run.state.eval_loss

    def save(self) -> Path | None:
        """Writes a checkpoint and returns its folder; None, with a warning, if that fails."""
        run = self._settled()
        if run.saved_at != run.state.step and not self._handler.is_over and not run.save():
            return None
        return run.folder.checkpoint_folder(run.saved_at)

    def set_learning_rate(self, rate: float) -> None:
        """Sets the next step's learning rate; later steps follow the schedule in proportion.

        Checkpoints store it, so a resumed run keeps it.

        Raises:
            ConfigError: If the rate is out of range, or the schedule's next rate is 0.
        """
        self._require_latest()
        _check("the learning rate", rate)
        run, schedule = self._settled(), self._handler.optimizer.schedule
        following = run.state.step + 1
        if self._handler.is_over or following > run.total_steps:
            return
        if run.state.plateau is not None:
            schedule.fixed_rate = run.state.plateau.rate
        planned = schedule.planned(following)
        if planned == 0:
            raise ConfigError(
                f"the schedule's learning rate of step {following} is 0, so it cannot be scaled to "
                "another one: set it after a later step"
            )
        self._multiply(float(rate) / planned)

    def scale_learning_rate(self, factor: float) -> None:
        """Multiplies the learning rates of all following steps; checkpoints store the factor.

        Raises:
            ConfigError: If the factor is out of range.
        """
        self._require_latest()
        _check("the learning rate's factor", factor)
        run = self._settled()
        if not self._handler.is_over and run.state.step < run.total_steps:
            self._multiply(float(factor) * run.state.rate_factor)

    def _multiply(self, factor: float) -> None:
        run, schedule = self._handler.run, self._handler.optimizer.schedule
        if factor == run.state.rate_factor:
            return
        step, run.state.rate_factor, schedule.factor = run.state.step, factor, factor
        run.events.note(
            f"after step {step} the learning rate is {schedule.rate(step + 1):.3g}, "
            f"{factor:.3g} times the schedule's"
        )
        if run.saved_at == step:
            run.save()  # the checkpoint of this step lacks the factor

    def _require_latest(self) -> None:
        if self._handler.present is not self:
            raise ConfigError(f"step {self.step} is over: use the latest step")

    def _settled(self) -> Run:
        """The run, after all queued steps have finished."""
        self._require_latest()
        self._handler.drain()
        return self._handler.run

    def _arrived(self) -> StepMetrics:
        if self._metrics is None and self.step > 0:
            self._handler.drain()
        return self._metrics or StepMetrics(None, None, None)


class TrainerCallback:
    """Watches and steers a run; subclass it and override the methods that you need.

    Pass instances to ``train`` or ``Trainer`` as ``callbacks``. Methods are called between two
    steps, when the device still computes; a ``Step`` reads metrics and stops, saves or evaluates
    the run. An evaluation or checkpoint that a callback requests calls no callback except
    ``on_log``. A callback that fails ends the run with a ``CallbackError``; the run is saved.
    """

    def on_train_begin(self, step: Step) -> None:
        """Called before the first step, or before the next one of a resumed run."""

    def on_step_end(self, step: Step) -> None:
        """Called after each step."""

    def on_log(self, step: Step, logs: dict[str, Any]) -> None:
        """Called with each row of metrics.jsonl: of a logged step, or of an evaluation."""

    def on_evaluate(self, step: Step) -> None:
        """Called after each evaluation, including the one before the first step."""

    def on_save(self, step: Step) -> None:
        """Called after a checkpoint or the final adapter was saved to ``step.saved``."""

    def on_train_end(self, step: Step, result: TrainResult) -> None:
        """Called at the end of a run, also of one that was stopped."""

    def on_event(self, event: dict[str, Any]) -> None:
        """Called at once with every event, as ``qlora-wgpu train --json`` prints it.

        The first ones, such as notes, the memory plan and weights being loaded, come before
        ``on_train_begin``.
        """


class _EventFeed(EventRows):
    """Passes a run's events to a callback's ``on_event``."""

    def __init__(self, callback: TrainerCallback) -> None:
        def write(row: Row) -> None:
            try:
                callback.on_event(row)
            except Exception as err:
                raise failure_of(f"{type(callback).__name__}.on_event", err) from err

        super().__init__(write)


def check_callbacks(callbacks: Sequence[TrainerCallback]) -> None:
    """Raises a ConfigError unless this is a list of callbacks, whose methods are all called."""
    is_list = isinstance(callbacks, list | tuple)
    if not is_list or not all(isinstance(each, TrainerCallback) for each in callbacks):
        raise ConfigError(
            f"callbacks must be a list of TrainerCallback objects, got {brief(callbacks)}"
        )
    known = [name for name in vars(TrainerCallback) if name.startswith("on_")]
    for each in callbacks:
        for name in dir(type(each)):
            if name.startswith("on_") and name not in known:
                raise ConfigError(
                    f"{type(each).__name__}.{name} is never called: a TrainerCallback has "
                    f"{', '.join(known)}"
                )


def subscribe_callbacks(events: Events, callbacks: Sequence[TrainerCallback]) -> None:
    """Passes the run's events to each callback that overrides ``on_event``."""
    for each in callbacks:
        if type(each).on_event is not TrainerCallback.on_event:
            events.subscribe(_EventFeed(each))


class CallbackHandler:
    """Calls a run's callbacks, and holds the run's parts that a ``Step`` needs."""

    def __init__(
        self, run: Run, callbacks: Sequence[TrainerCallback], evaluator: Evaluator,
        optimizer: Optimizer,
    ) -> None:  # fmt: skip
        self.run, self.evaluator, self.optimizer = run, evaluator, optimizer
        # Waits for all queued steps
        self.drain: Callable[[], None] = lambda: None
        self.latest: Row = {}  # the latest evaluation's metrics
        # Whether no step follows: requests are then ignored
        self.is_over = False
        self._callbacks = tuple(callbacks)
        self._logs: list[Row] = []  # rows that on_log has not been called with
        self._is_calling = False
        self._latest_step: Step | None = None
        self.submitted(run.state.step, run.state.learning_rate)

    def submitted(self, step: int, learning_rate: float) -> None:
        """A step was queued."""
        self._latest_step = Step(self, step, learning_rate)
        self._present = weakref.ref(self._latest_step)

    @property
    def present(self) -> Step:
        """The latest step."""
        step = self._present()
        assert step is not None  # the handler holds it during the run, its user afterwards
        return step

    def release(self) -> None:
        """Drops all references to a run that is over, so that its model can be freed."""
        self.drain = lambda: None
        self.run.events, self.run.callbacks = Events(), None
        self._latest_step = None

    def on_log(self, row: Row) -> None:
        """Keeps a row of metrics.jsonl until callbacks may be called."""
        self._logs.append(dict(row))

    def on_evaluate(self, row: Row) -> None:
        """Keeps the metrics of an evaluation and calls the callbacks."""
        self.latest = row
        self.on_log(row)
        self.call("on_evaluate")

    def on_save(self, folder: Path) -> None:
        """Notes the folder that was written and calls the callbacks."""
        self.present.saved = folder
        self.call("on_save")

    def call(self, name: str, *details: Any) -> None:
        """Calls a method of all callbacks, unless one of them has caused the event."""
        if self._is_calling:
            return
        self._is_calling = True
        try:
            while self._logs:
                self._call("on_log", self._logs.pop(0))
            self._call(name, *details)
        finally:
            self._is_calling = False

    def _call(self, name: str, *details: Any) -> None:
        for callback in self._callbacks:
            try:
                getattr(callback, name)(self.present, *details)
            except (DeviceError, ClusterError, WeightFileError, TrainingError):
                raise  # errors of the run itself
            except Exception as err:
                what = f"{type(callback).__name__}.{name}"
                raise failure_of(what, err, f" after step {self.present.step}") from err


def _check(name: str, value: object) -> None:
    """Raises a ConfigError if a learning rate, or a factor of one, is out of range."""
    minimum, maximum = LEARNING_RATES
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not minimum <= value <= maximum:  # type: ignore[operator]
        raise ConfigError(f"{name} must be from {minimum:g} to {maximum:g}, got {brief(value)}")
