"""The metrics of a step after their readback: checked for divergence, summed up and logged."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from qlora_wgpu.config import TrainConfig
from qlora_wgpu.ops.optimizers import (
    SATURATED_OFFSET,
    STATS_BALANCE,
    STATS_CORRECT,
    STATS_LENGTH,
    STATS_LOSS,
    STATS_METRICS,
    STATS_NORM,
    STATS_TOKENS,
)
from qlora_wgpu.ops.policy import METRICS as POLICY_METRICS
from qlora_wgpu.ops.policy import means as policy_means
from qlora_wgpu.ops.preference import METRICS, means
from qlora_wgpu.ops.score import means as score_means
from qlora_wgpu.training.observers import Row, WorkerMetrics
from qlora_wgpu.training.policies import policy_of
from qlora_wgpu.training.preferences import preference_of, samples_of, scoring_of

if TYPE_CHECKING:
    from qlora_wgpu.training.run import Run

# ---- a step --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SubmittedStep:
    """A queued step, which the device may still be computing."""

    step: int  # its number, from 1 on
    learning_rate: float  # the learning rate of its update
    tokens: int  # tokens of its rows
    workers: tuple[WorkerMetrics, ...] = ()  # what each cluster worker did
    weight_unit: float = 1.0  # the divisor of its rows' weights


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of a step."""

    loss: float | None  # mean over its label tokens; None without labels
    accuracy: float | None  # token accuracy
    norm: float | None  # norm of its gradient


class MetricsLogger:
    """Writes the rows of training steps to metrics.jsonl."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._balance = router_aux_loss_coef(run)
        self._divergence = Divergence(math.log(run.model.architecture.vocab_size))
        self._samples = samples_of(run.config.train)
        self._policy = policy_of(run.config)

    def finish(self, submitted: SubmittedStep, data: bytes) -> StepMetrics:
        """Checks and adds up a step's sums from the device; logs them if a row is due."""
        stats = np.frombuffer(data, np.float32)
        self._count_saturated(submitted, data)
        unit = submitted.weight_unit
        balance, labels = unit * float(stats[STATS_BALANCE]), unit * float(stats[STATS_TOKENS])
        loss = unit * float(stats[STATS_LOSS]) + self._balance * balance
        norm = float(stats[STATS_NORM])
        self._check(submitted.step, loss, labels, norm)
        state = self._run.state
        state.step = submitted.step
        state.num_tokens += submitted.tokens
        is_supervised = self._samples is None and self._policy is None
        hits = unit * float(stats[STATS_CORRECT]) if is_supervised else None
        state.window.append((loss, labels, hits, balance))
        if self._samples is not None:
            own = [float(value) for value in stats[STATS_METRICS:STATS_LENGTH]]
            state.add_metrics(own)
        if self._policy is not None and self._run.rollouts is not None:
            sums = dict(zip(POLICY_METRICS, stats[STATS_METRICS:].tolist(), strict=False))
            state.add_averages(policy_means(sums, self._policy))
            state.add_averages(self._run.rollouts.metrics(submitted.step))
        for worker in submitted.workers:
            before = self._run.workers.get(worker.name)
            self._run.workers[worker.name] = before.and_then(worker) if before else worker
        self._run.throughput.add(submitted.tokens)
        state.learning_rate, state.grad_norm = submitted.learning_rate, norm
        if submitted.step % self._run.config.log.logging_steps == 0:
            log_window(self._run)
        if not labels:
            return StepMetrics(None, None, norm)
        return StepMetrics(loss / labels, None if hits is None else hits / labels, norm)

    def _count_saturated(self, submitted: SubmittedStep, data: bytes) -> None:
        """Counts clamped values; warns the first time.

        Weights that are kept dequantized count in every step, as if the step dequantized them;
        workers have counted theirs.
        """
        count = int.from_bytes(data[SATURATED_OFFSET : SATURATED_OFFSET + 4], "little")
        if not submitted.workers:
            count += self._run.model.kept_saturated
        if count and not self._run.saturated:
            self._run.events.warning(
                f"step {submitted.step}: {count:,} values exceed the maximum of matrix units "
                "(65,504 in float16) and were clamped, so the results are wrong; "
                "train with train.compute_dtype: float32 or device.backend: wgpu"
            )
        self._run.saturated += count

    def check_end(self) -> None:
        """Checks the whole run after its last step."""
        if self._samples is not None or self._policy is not None:
            return  # their losses are not comparable with a uniform guess
        if reason := self._divergence.ended():
            raise self._run.failure(f"the loss has diverged: as the run ends, {reason}")
        if reason := self._divergence.without_progress():
            rate = self._run.config.optim.learning_rate
            self._run.events.warning(
                f"the run has not improved the model: {reason}; train again with a lower "
                f"optim.learning_rate than {rate:g}, such as {rate / 10:.1g}"
            )

    def _check(self, step: int, loss: float, labels: float, norm: float) -> None:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            if step == 1:  # before the first update
                raise self._run.failure_at_start("the loss or its gradient is not finite at step 1")
            raise self._run.failure(f"the loss or its gradient is no longer finite at step {step}")
        if self._samples is not None or self._policy is not None:
            return
        if labels and (reason := self._divergence.diverged(loss / labels, norm)):
            raise self._run.failure(
                f"the loss has diverged: {loss / labels:.2f} at step {step}, and for ten steps "
                f"{reason}"
            )


def log_window(run: Run) -> None:
    """Logs the steps since the last row, if there are any."""
    state = run.state
    if not state.window:
        return
    total, count = sum(w[0] for w in state.window), sum(w[1] for w in state.window)
    hits = [w[2] for w in state.window if w[2] is not None]
    is_known = count > 0 and len(hits) == len(state.window)
    state.last_loss = total / count if count else None
    row: Row = {
        "step": state.step,
        "loss": state.last_loss,
        "mean_token_accuracy": sum(hits) / count if is_known else None,
        **answer_metrics(run.config.train, state.metrics),
        **_policy_metrics(run),
        "learning_rate": state.learning_rate,
        "grad_norm": state.grad_norm,
        "num_tokens": state.num_tokens,
        "tokens_per_second": run.throughput.tokens_per_second,
    }
    if router_aux_loss_coef(run):
        row["aux_loss"] = sum(w[3] for w in state.window) / count if count else None
    if run.saturated:
        row["saturated"] = run.saturated
    if run.sources is not None and (rows := run.sources.until(state.step)):
        row["sources"] = rows
    if workers := tuple(run.workers.values()):
        row["workers"] = _shares(workers)
        run.events.workers(workers)
        run.workers.clear()
    state.window.clear()
    state.metrics.clear()
    state.averages.clear()
    state.logged_step = state.step
    run.folder.log.append(row)
    run.logged(row)


def router_aux_loss_coef(run: Run) -> float:
    """The factor of the load-balancing loss of experts; 0 unless training is supervised."""
    if samples_of(run.config.train) is not None or policy_of(run.config) is not None:
        return 0.0
    return run.model.architecture.balance_coefficient(run.config.train.router_aux_loss_coef)


def answer_metrics(settings: TrainConfig, sums: Sequence[float], prefix: str = "") -> Row:
    """The metrics of an objective over answers or sequences, by TRL's names; else empty."""
    if (scoring := scoring_of(settings)) is not None and sums:
        return {f"{prefix}{name}": value for name, value in score_means(sums, scoring).items()}
    preference = preference_of(settings)
    if preference is None or not sums:
        return {}
    known = dict.fromkeys(METRICS, 0.0) | dict(zip(METRICS, sums, strict=False))
    found = means(known, preference)
    return {f"{prefix}{name}": value for name, value in found.items()}


def _policy_metrics(run: Run) -> Row:
    """The mean metrics of GRPO or RLOO by TRL's names, and the share of time in generation."""
    if policy_of(run.config) is None or run.rollouts is None:
        return {}
    means = {name: total / count for name, (total, count) in run.state.averages.items()}
    return {**means, "generation_share": run.rollouts.seconds / run.throughput.seconds}


def _shares(workers: Sequence[WorkerMetrics]) -> dict[str, dict[str, float | None]]:
    total = sum(worker.tokens for worker in workers)
    return {
        worker.name: {
            "share": worker.tokens / total if total else 0.0,
            "tokens_per_second": worker.tokens_per_second,
        }
        for worker in workers
    }


# ---- divergence ----------------------------------------------------------------------------------

_FIRST, _LAST = 5, 10  # steps
_WORSE = 1.5  # nats
_SOLVED = 0.01  # nats below which a gradient may vanish
_UNIFORM = 0.1  # nats around the loss of a uniform guess
_HIGHER = 0.3  # nats above the first steps, more than the choice of rows explains
_FAR_ABOVE = "the loss is far above the first ones"
_NO_GRADIENT = "the gradient is zero"


class Divergence:
    """Detects ten consecutive steps whose loss or gradient is far worse than at the start.

    Steps are compared with the mean of the first five, and, since a run may diverge within these,
    with the first one and a uniform guess: a model far worse than both has diverged. If weights
    have grown so large that norms overflow, all logits are equal and the gradient is exactly zero,
    which the loss does not show.
    """

    def __init__(self, uniform: float = math.inf) -> None:
        """Has no steps yet; ``uniform`` is the loss of a uniform guess."""
        self._uniform = uniform
        self._steps = 0
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=_LAST)
        self._problems: deque[str | None] = deque(maxlen=_LAST)

    def diverged(self, loss: float, norm: float = 1.0) -> str | None:
        """Records a step's loss and gradient norm; how the last ten have diverged, or None."""
        if len(self._first) < _FIRST:
            self._first.append(loss)
        self._steps += 1
        self._last.append(loss)
        self._problems.append(self._problem(loss, norm))
        if len(self._last) < _LAST:
            return None
        if min(self._last) > sum(self._first) / len(self._first) + _WORSE:
            return _FAR_ABOVE
        return self._problems[-1] if all(self._problems) else None

    def ended(self) -> str | None:
        """How a run that ends here, maybe before ten steps, has diverged, or None."""
        half, problems = math.ceil(self._steps / 2), list(self._problems)
        has_vanished = problems[-2:] == [_NO_GRADIENT] * 2  # it does not recover from that
        if has_vanished or (1 < half <= _LAST and all(problems[-half:])):
            return problems[-1]
        return None

    def without_progress(self) -> str | None:
        """Why a run that ends here has not improved the model, or None.

        An adapter that has grown too large may leave a model whose loss is finite and steady, but
        no better than a guess.
        """
        if self._steps < _FIRST + _LAST:
            return None
        first, last = sum(self._first) / len(self._first), sum(self._last) / len(self._last)
        if all(abs(loss - self._uniform) < _UNIFORM for loss in self._last):
            return f"its last losses, {last:.2f}, are those of a uniform guess"
        if last > first + _HIGHER:
            return f"its last losses, {last:.2f}, are above its first ones, {first:.2f}"
        return None

    def _problem(self, loss: float, norm: float) -> str | None:
        if norm == 0 and loss > _SOLVED:
            return _NO_GRADIENT
        return _FAR_ABOVE if loss > max(self._first[0], self._uniform) + _WORSE else None
