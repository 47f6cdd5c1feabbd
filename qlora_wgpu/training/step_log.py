"""The figures of a step, once they have arrived from the device: checked, summed up, logged."""

from __future__ import annotations

import math
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
from qlora_wgpu.ops.preference import METRICS, means
from qlora_wgpu.training.divergence import Divergence
from qlora_wgpu.training.observers import Row, WorkerFigures
from qlora_wgpu.training.preferences import preference_of

if TYPE_CHECKING:
    from qlora_wgpu.training.run import Run


@dataclass(frozen=True)
class SubmittedStep:
    """A step that the device may still be working on, and what workers did for it."""

    step: int  # its number, from 1 on
    learning_rate: float  # the rate of its update
    tokens: int  # tokens of its rows
    workers: tuple[WorkerFigures, ...] = ()  # what each worker did
    weight_unit: float = 1.0  # what weights of its rows were divided by


@dataclass(frozen=True)
class StepFigures:
    """What a step has given."""

    loss: float | None  # mean of its labels; None without one
    accuracy: float | None  # share of them that is predicted
    norm: float | None  # of its gradient


class MetricsLogger:
    """Writes metrics.jsonl's rows of training steps."""

    def __init__(self, run: Run) -> None:
        """Has seen no step yet."""
        self._run = run
        self._balance = router_aux_loss_coef(run)
        self._divergence = Divergence(math.log(run.model.architecture.vocab_size))
        self._preference = preference_of(run.config.train)

    def finish(self, submitted: SubmittedStep, data: bytes) -> StepFigures:
        """Takes in a step's sums."""
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
        hits = None if self._preference else unit * float(stats[STATS_CORRECT])
        state.window.append((loss, labels, hits, balance))
        if self._preference is not None:
            own = [float(value) for value in stats[STATS_METRICS:STATS_LENGTH]]
            state.add_metrics(own)
        for worker in submitted.workers:
            before = self._run.workers.get(worker.name)
            self._run.workers[worker.name] = before.and_then(worker) if before else worker
        self._run.throughput.add(submitted.tokens)
        state.learning_rate, state.grad_norm = submitted.learning_rate, norm
        if submitted.step % self._run.config.log.logging_steps == 0:
            log_window(self._run)
        if not labels:
            return StepFigures(None, None, norm)
        return StepFigures(loss / labels, None if hits is None else hits / labels, norm)

    def _count_saturated(self, submitted: SubmittedStep, data: bytes) -> None:
        """Notes what kernels had to hold at the end of their type; says so the first time.

        Weights that are kept dequantized count at every step, as those do that it dequantizes;
        workers have counted theirs.
        """
        count = int.from_bytes(data[SATURATED_OFFSET : SATURATED_OFFSET + 4], "little")
        if not submitted.workers:
            count += self._run.model.kept_saturated
        if count and not self._run.saturated:
            self._run.events.warning(
                f"step {submitted.step}: {count:,} values are larger than matrix units take "
                "(65,504 in float16) and were held there, so that the model is computed wrongly; "
                "train it with train.compute_dtype: float32 or device.backend: wgpu"
            )
        self._run.saturated += count

    def check_end(self) -> None:
        """Looks back once all steps are done."""
        if self._preference is not None:
            return  # its losses are not those of tokens, and it may begin far above its end
        if reason := self._divergence.ended():
            raise self._run.failure(f"the loss has diverged: as the run ends, {reason}")
        if reason := self._divergence.in_vain():
            rate = self._run.config.optim.learning_rate
            self._run.events.warning(
                f"the run has learnt nothing: {reason}; train again with a lower "
                f"optim.learning_rate than {rate:g}, such as {rate / 10:.1g}"
            )

    def _check(self, step: int, loss: float, labels: float, norm: float) -> None:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            if step == 1:  # no rate has had a part in it
                raise self._run.failure_at_start("the loss or its gradient is not finite at step 1")
            raise self._run.failure(f"the loss or its gradient is no longer finite at step {step}")
        if self._preference is not None:
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
    state.logged_step = state.step
    run.folder.log.append(row)
    run.logged(row)


def router_aux_loss_coef(run: Run) -> float:
    """The factor of the loss that balances experts, 0 without; over answers there is none."""
    if preference_of(run.config.train) is not None:
        return 0.0
    return run.model.architecture.balance_coefficient(run.config.train.router_aux_loss_coef)


def answer_metrics(settings: TrainConfig, sums: Sequence[float], prefix: str = "") -> Row:
    """What is logged of an objective over answers, by TRL's names; nothing of another."""
    preference = preference_of(settings)
    if preference is None or not sums:
        return {}
    known = dict.fromkeys(METRICS, 0.0) | dict(zip(METRICS, sums, strict=False))
    found = means(known, preference)
    return {f"{prefix}{name}": value for name, value in found.items()}


def _shares(workers: Sequence[WorkerFigures]) -> dict[str, dict[str, float | None]]:
    """Each worker's share of the tokens, and its speed."""
    total = sum(worker.tokens for worker in workers)
    return {
        worker.name: {
            "share": worker.tokens / total if total else 0.0,
            "tokens_per_second": worker.tokens_per_second,
        }
        for worker in workers
    }
