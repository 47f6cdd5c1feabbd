"""The result of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from qlora_wgpu.visible import without_secrets


def as_json(value: Any) -> Any:
    """A value of a run's events as JSON has it, without secrets; dataclasses are objects."""
    if is_dataclass(value):
        return {each.name: as_json(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    return without_secrets(str(value)) if isinstance(value, str | Path) else value


@dataclass(frozen=True)
class Sample:
    """One text that the model continues, before and after training.

    Attributes:
        prompt: The text to continue.
        expected: How the data goes on.
        before: The model's continuation before the first step.
        after: The model's continuation in the end; empty after an interruption.
    """

    prompt: str
    expected: str
    before: str
    after: str = ""


@dataclass(frozen=True)
class Written:
    """One text that the model has continued.

    Attributes:
        prompt: The text to continue.
        expected: How the data goes on; empty where nobody says it.
        text: The model's continuation.
    """

    prompt: str
    expected: str
    text: str


@dataclass(frozen=True)
class TrainResult:
    """The result of a run.

    Attributes:
        steps: Optimizer steps done.
        train_loss: Mean loss over the label tokens of the last logged steps, or None.
        eval_loss_before: Held-out loss before the first step, if there is held-out data.
        eval_loss: Held-out loss after the last step, if there is held-out data.
        best_eval_loss: The held-out loss of the best evaluation: the lowest, unless
            ``eval.metric_for_best_model`` is another figure.
        best_metric: That figure then.
        metric_for_best_model: Its name.
        best_step: When it was measured.
        num_tokens: Tokens trained on, padding not counted.
        seconds: Time from the first step to the end.
        interrupted: Whether the user, or an observer, stopped it early: it can be resumed.
        stopped_early: Whether it ended because evaluations got no better.
        was_finished: Whether it had ended before it was resumed, so that nothing was trained.
        run_dir: The run's folder.
        adapter_dir: The final adapter within it.
        peak_bytes: Most bytes that were ever allocated on the device.
        stop_reason: The reason that the observer gave for stopping it.
        stop_signal: The number of the signal that did, as with Ctrl-C, SIGTERM or SIGHUP.
        sample: A text before and after; None from a ``Trainer``, which has no tokenizer.
        samples: All texts before and after, of which ``sample`` is the first.
        reports: Pages and pictures of the run that were written; none from a ``Trainer``.
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
    was_finished: bool = False
    best_metric: float | None = None
    metric_for_best_model: str = "loss"
    stop_reason: str | None = None
    stop_signal: int | None = None
    sample: Sample | None = None
    samples: tuple[Sample, ...] = ()
    reports: tuple[Path, ...] = ()

    def __repr__(self) -> str:
        """Steps, losses and folder in a line; the attributes have the rest."""
        steps = f"{self.steps:,} step{'s' * (self.steps != 1)}"
        parts = [steps, f"{self.num_tokens:,} tokens in {self.seconds:,.0f} s"]
        if self.eval_loss is not None:
            before = self.eval_loss_before
            start = "" if before is None else f"{before:.4f} before, "
            parts.append(f"held-out loss {start}{self.eval_loss:.4f} after")
        elif self.train_loss is not None:
            parts.append(f"loss {self.train_loss:.4f}")
        if self.interrupted:
            parts.append(f"stopped: {self.stop_reason or 'interrupted'}")
        return f"{type(self).__name__}({', '.join(parts)}; {self.run_dir})"
