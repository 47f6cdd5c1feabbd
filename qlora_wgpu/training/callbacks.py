"""Callbacks: what a user's code sees and may do between two steps of a run."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING

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
from qlora_wgpu.training.observers import Events, Row, failure_of
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
        """Is created by the trainer."""
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

    def stop(self, reason: str = "the program stopped it") -> None:
        """Ends the run after this step and saves its state.

        Args:
            reason: Becomes ``TrainResult.stop_reason``.
        """
        self._require_latest()
        self._handler.run.events.stop_run(reason)

    def evaluate(self) -> float:
        """Measures and logs the held-out loss of the current model, at most once per step.

        Raises:
            ConfigError: If there is no held-out data.
        """
        run = self._settled()
        if run.state.eval_step != run.state.step:
            self._handler.evaluator.measure(run.state.step)
        if run.state.eval_loss is None:
            raise ConfigError("there is no held-out loss: the run has no held-out data")
        return run.state.eval_loss

    def save(self) -> Path | None:
        """Writes a checkpoint and returns its folder; None, with a warning, if that fails."""
        run = self._settled()
        if run.saved_at != run.state.step and not self._handler.is_over and not run.save():
            return None
        return run.folder.checkpoint_folder(run.saved_at)

    def set_learning_rate(self, rate: float) -> None:
        """Sets the next step's rate; later ones follow the schedule in the same proportion.

        Checkpoints store it, so a resumed run keeps it.

        Raises:
            ConfigError: If it is out of range, or the schedule's next rate is 0.
        """
        self._require_latest()
        _check("a learning rate", rate)
        run, schedule = self._settled(), self._handler.optimizer.schedule
        following = run.state.step + 1
        if self._handler.is_over or following > run.total_steps:
            return
        if run.state.plateau is not None:
            schedule.held = run.state.plateau.rate
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
        _check("the factor of learning rates", factor)
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


Callback = Callable[[Step], object]


@dataclass(frozen=True)
class Callbacks:
    """Functions that are called between two steps.

    Attributes:
        on_step: After each step.
        on_evaluate: After each evaluation, including the one before the first step.
        on_save: After a checkpoint or the adapter is written.
    """

    on_step: Callback | None = None
    on_evaluate: Callback | None = None
    on_save: Callback | None = None

    def check(self) -> None:
        """Raises a ConfigError if one is not callable."""
        for name, function in vars(self).items():
            if function is not None and not callable(function):
                raise ConfigError(f"{name} must be a function of a step, got {brief(function)}")


NO_CALLBACKS = Callbacks()


class CallbackHandler:
    """Calls the callbacks, and performs what they request."""

    def __init__(
        self, run: Run, callbacks: Callbacks, evaluator: Evaluator, optimizer: Optimizer
    ) -> None:
        """Starts at the step of the run's state."""
        self.run, self.evaluator, self.optimizer = run, evaluator, optimizer
        # Waits for all queued steps
        self.drain: Callable[[], None] = lambda: None
        self.latest: Row = {}  # the latest evaluation's metrics
        # Whether no step follows: requests are then ignored
        self.is_over = False
        self._callbacks = callbacks
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

    def on_evaluate(self, row: Row) -> None:
        """The held-out loss was measured."""
        self.latest = row
        self.call("on_evaluate")

    def on_save(self, folder: Path) -> None:
        """A checkpoint or the adapter was written."""
        self.present.saved = folder
        self.call("on_save")

    def call(self, name: str) -> None:
        """Calls a callback; evaluations and checkpoints that it requests call no other."""
        function = getattr(self._callbacks, name)
        if function is None or self._is_calling:
            return
        self._is_calling = True
        try:
            function(self.present)
        except (DeviceError, ClusterError, WeightFileError, TrainingError):
            raise  # these already say what happens to the run
        except Exception as err:
            raise failure_of(name, err, f" after step {self.present.step}") from err
        finally:
            self._is_calling = False


def _check(name: str, value: object) -> None:
    """Raises a ConfigError if a learning rate, or a factor of one, is out of range."""
    minimum, maximum = LEARNING_RATES
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not minimum <= value <= maximum:  # type: ignore[operator]
        raise ConfigError(f"{name} must be from {minimum:g} to {maximum:g}, got {brief(value)}")
