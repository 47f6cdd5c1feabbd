"""Held-out loss and sample texts, which a run computes between two steps.

``samples.jsonl`` has a row for each text: ``step, prompt, expected, text``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Protocol

from qlora_wgpu.config import EvalConfig
from qlora_wgpu.config.values import AT_EVALUATIONS, LOSS
from qlora_wgpu.data import Dataset
from qlora_wgpu.errors import CheckpointError, ConfigError
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.model.adapter_model import AdapterModel
from qlora_wgpu.model.steps import LossSums
from qlora_wgpu.ops.optimizers import STATS_LENGTH, STATS_LOSS, STATS_METRICS, STATS_TOKENS
from qlora_wgpu.training.batching import padded_batch, sorted_by_length
from qlora_wgpu.training.checkpoints import BestAdapter
from qlora_wgpu.training.executor import Arrays, Executor, MeasuresLoss, MicroBatch
from qlora_wgpu.training.images import BatchImages
from qlora_wgpu.training.observers import Row, Written
from qlora_wgpu.training.optimizer import Plateau
from qlora_wgpu.training.preferences import PreferenceData, in_blocks
from qlora_wgpu.training.run_folder import RunLog
from qlora_wgpu.training.scoring import ScoredData, scored_loss
from qlora_wgpu.training.step_log import answer_metrics

if TYPE_CHECKING:
    from qlora_wgpu.training.run import Run

# ---- held-out loss -------------------------------------------------------------------------------


def held_out_loss(
    model: MeasuresLoss,
    rows: Dataset,
    batch_size: int,
    max_length: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
    images: BatchImages | None = None,
) -> LossSums:
    """The loss summed over all label tokens of a data set, their number and hits."""
    longest = max(max_length, rows.longest)

    def batches() -> Iterator[Arrays]:
        for index, chunk in enumerate(sorted_by_length(rows, batch_size)):
            progress(index * batch_size, len(rows))
            batch = padded_batch(chunk, batch_size, longest)
            if (batch.labels[:, 1:] != IGNORE_INDEX).any():
                ids, mask = batch.input_ids, batch.attention_mask
                inputs = None if images is None else images(chunk, ids, mask)
                yield ids, batch.labels, mask, inputs

    return model.summed_loss(batches())


def answer_sums(
    model: AdapterModel,
    executor: Executor,
    answers: PreferenceData,
    rows: Dataset,
    batch_size: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[float]:
    """Loss, number of pairs or answers, and metrics, each summed over a data set."""
    preference = model.options.objective.preference
    assert preference is not None

    def done(count: int) -> None:
        progress(min(count * batch_size // rows.unit, rows.num_rows), rows.num_rows)

    blocks = in_blocks(rows, preference, batch_size)
    batches = answers.batches(blocks, batch_size)
    stats = executor.answer_sums((MicroBatch.of_answers(model, b) for b in batches), done).tolist()
    return [stats[STATS_LOSS], stats[STATS_TOKENS], *stats[STATS_METRICS:STATS_LENGTH]]


class Evaluator:
    """Measures a run's held-out loss, and keeps the best adapter."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._rows = run.held_out
        self._every = steps_between(run.config.eval.eval_steps, run.total_steps)

    @property
    def is_pending(self) -> bool:
        """Whether the current adapter has not been evaluated."""
        return self._rows is not None and self._run.state.eval_step != self._run.state.step

    def is_due(self, step: int) -> bool:
        """Whether an evaluation follows a step."""
        return self._rows is not None and self._every > 0 and step % self._every == 0

    @property
    def has_stalled(self) -> bool:
        """Whether no evaluation improved for ``early_stopping_patience`` evaluations."""
        settings, state = self._run.config.eval, self._run.state
        patience = settings.early_stopping_patience
        is_same = state.aim == settings.aim  # otherwise the count is of another metric
        return is_same and patience is not None and state.without_gain >= patience

    def measure(self, step: int) -> float | None:
        """Measures and logs the mean loss per label token, pair or answer; None without data."""
        if self._rows is None:
            return None
        with self._run.throughput.paused():
            return self._measure(self._rows, step)

    def _measure(self, rows: Dataset, step: int) -> float:
        run = self._run
        answers = run.held_out_answers
        confusion: dict[str, dict[str, int]] = {}
        if run.rollouts is not None:
            made = run.rollouts.evaluate(step)
            found = {f"eval_{name}": value for name, value in made.items() if math.isfinite(value)}
            found = {"eval_loss": -found.get("eval_reward", math.nan), **found}
        elif isinstance(answers, ScoredData):
            asked = run.model, run.executor, answers, rows, run.config.rows_at_once
            scored = scored_loss(*asked, self._progress)
            found = {"eval_loss": scored.loss}
            found |= {f"eval_{name}": value for name, value in scored.metrics.items()}
            if scored.confusion is not None:
                confusion = scored.confusion.by_name(run.config.train.labels or ())
        elif answers is not None:
            given = run.model, run.executor, answers, rows, run.config.rows_at_once
            loss, count, *metrics = answer_sums(*given, self._progress)
            found = {"eval_loss": loss / count}
            found |= answer_metrics(run.config.train, metrics, "eval_")
        else:
            size = run.config.train.per_device_train_batch_size
            sums = held_out_loss(run.executor, rows, size, run.longest, self._progress, run.images)
            accuracy = sums.correct / sums.tokens
            found = {"eval_loss": sums.loss / sums.tokens, "eval_mean_token_accuracy": accuracy}
        run.events.activity("")
        loss = found["eval_loss"]
        if not math.isfinite(loss) and run.rollouts is not None:
            raise run.failure("no reward function gives a reward for the held-out prompts")
        if not math.isfinite(loss):
            if step == 0:
                raise run.failure_at_start("the held-out loss is not finite")
            raise run.failure(f"the held-out loss is not finite after step {step}")
        name = run.config.eval.metric_for_best_model
        if f"eval_{name}" not in found:
            raise ConfigError(
                f"eval.metric_for_best_model: {name} is not a metric of the evaluation: it has "
                f"{', '.join(key.removeprefix('eval_') for key in found)}"
            )
        metric = found[f"eval_{name}"]
        if not math.isfinite(metric):
            raise run.failure(f"the held-out {name} is not finite after step {step}")
        row: Row = {"step": step, **found}
        if confusion:
            row["eval_confusion"] = confusion
        run.folder.log.append(row)
        if run.state.plateau is not None and step > 0 and self.is_due(step):
            self._follow_plateau(run.state.plateau, metric, step)
        best = run.state.evaluated(loss, metric, step, run.config.eval)
        if best and run.keeps_best:
            self._keep_best(step, loss, metric)
        run.evaluated(row)  # last, since observers may stop or save the run
        return loss

    def _follow_plateau(self, plateau: Plateau, metric: float, step: int) -> None:
        before, settings = plateau.rate, self._run.config.eval
        if plateau.measured(metric, self._run.config.optim, more_is_better=settings.more_is_better):
            self._run.events.note(
                f"step {step}: {plateau_message(settings)}, so the learning rate is reduced from "
                f"{before:.3g} to {plateau.rate:.3g}"
            )

    def _progress(self, done: int, total: int) -> None:
        self._run.events.activity(f"held-out loss: {done:,} of {total:,} rows")

    def _keep_best(self, step: int, loss: float, metric: float) -> None:
        """Keeps the adapter in memory, and on disk if it can be written."""
        run = self._run
        parameters = run.model.read_flat(run.model.adapter.parameters).copy()
        run.best = BestAdapter(step, loss, metric, run.config.eval.aim, parameters)
        try:
            run.save_best()
        except CheckpointError as err:
            run.events.warning(
                f"the best adapter so far is in memory only: {err}; the next checkpoint tries again"
            )


def plateau_message(settings: EvalConfig) -> str:
    """That evaluations no longer improve, in words."""
    name = settings.metric_for_best_model
    if name == LOSS:
        return "the held-out loss no longer falls"
    return f"the held-out {name} no longer {'rises' if settings.more_is_better else 'falls'}"


def steps_between(eval_steps: float, total: int) -> int:
    """The interval of evaluations: steps, 0 for the end only, or a share of all steps below 1."""
    if eval_steps >= 1 or eval_steps == 0:
        return int(eval_steps)
    return max(1, round(total * eval_steps))


# ---- sample texts --------------------------------------------------------------------------------


class SampleGenerator(Protocol):
    """Generates the sample texts of a run."""

    @property
    def first(self) -> Sequence[Written]:
        """The texts generated before the first step."""

    def write(self) -> Iterator[Written]:
        """Continues one prompt after another with the current model."""


class SampleLogger:
    """Generates and logs a run's sample texts between two steps."""

    def __init__(self, run: Run, texts: SampleGenerator | None, evaluator: Evaluator) -> None:
        self._run = run
        self._texts = texts
        self._evaluator = evaluator
        every = run.config.eval.sample_steps
        self._every: int | None = None
        if every != AT_EVALUATIONS:
            self._every = steps_between(float(every), run.total_steps)

    def is_due(self, step: int) -> bool:
        """Whether texts are generated after a step."""
        if self._texts is None:
            return False
        if self._every is None:
            return self._evaluator.is_due(step)
        return self._every > 0 and step % self._every == 0

    def keep_first(self) -> None:
        """Logs the texts generated before the first step."""
        if self._texts is not None:
            log_texts(self._run.folder.texts, 0, self._texts.first)

    def write(self, step: int) -> None:
        """Generates and logs all texts, or logs none if the run is stopped meanwhile."""
        assert self._texts is not None
        run, written = self._run, list[Written]()
        run.events.activity("generating samples")
        with run.throughput.paused():
            for text in self._texts.write():
                written.append(text)
                if run.stop.requested:
                    break
        run.events.activity("")
        if not run.stop.requested:
            log_texts(run.folder.texts, step, written)
            run.events.written(step, written)


def log_texts(log: RunLog, step: int, texts: Sequence[Written]) -> None:
    """Appends texts to ``samples.jsonl``."""
    for text in texts:
        log.append({"step": step, **asdict(text)})
