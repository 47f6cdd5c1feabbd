"""Reward models and classifiers: their labels, their batches, and their held-out metrics."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.config import Config, TrainConfig
from qlora_wgpu.data import Dataset
from qlora_wgpu.data.dataset import read_label_names
from qlora_wgpu.errors import ConfigError, DataError
from qlora_wgpu.model.adapter_model import AdapterModel
from qlora_wgpu.model.batch_encoding import pooled_rows
from qlora_wgpu.model.steps import ScoreInputs
from qlora_wgpu.ops.optimizers import STATS_LENGTH, STATS_LOSS, STATS_METRICS, STATS_TOKENS
from qlora_wgpu.ops.score import Scoring, means
from qlora_wgpu.training.batching import padded_batch
from qlora_wgpu.training.executor import Executor, MicroBatch
from qlora_wgpu.training.preferences import Block, PreferenceBatch, in_blocks, scoring_of

FloatArray = npt.NDArray[np.float32]


# ---- labels --------------------------------------------------------------------------------------


def with_labels(config: Config, rows: Any = None) -> Config:
    """The settings with the labels of the training data, or of ``rows``, if they name none.

    Raises:
        ConfigError: If there is only one label, or not one weight for each.
        DataError: If a row has no valid label.
    """
    train = config.train
    if train.objective != "classification" or train.problem_type == "regression":
        return config
    if train.labels is None:
        found: dict[str, None] = {}
        if rows is not None:
            names = read_label_names(rows, config.data.columns, train.problem_type)
            found = dict.fromkeys(names)
        else:
            for part in config.require_train().parts():
                assert part.train is not None
                names = read_label_names(part.train, part.columns, train.problem_type)
                found |= dict.fromkeys(names)
        names = sorted(found, key=_in_order)
        config = config.model_copy(update={"train": train.model_copy(update={"labels": names})})
    count = len(config.train.labels or ())
    if count < 2 and train.problem_type == "single_label_classification":
        raise ConfigError(
            f"train.objective: classification requires at least two labels, but there "
            f"{'is only one' if count else 'are none'}: set train.labels, or use other data"
        )
    if train.class_weights is not None and len(train.class_weights) != count:
        raise ConfigError(
            f"train.class_weights must have {count} weights, one per label, got "
            f"{len(train.class_weights)}"
        )
    return config


def check_head(settings: TrainConfig, classes: int) -> None:
    """Refuses a model whose head is not that of the objective; ``classes`` are its scores, or 0.

    Raises:
        ConfigError: If it is not.
    """
    scoring = scoring_of(settings)
    needed = 0 if scoring is None else scoring.classes
    if needed == classes:
        return
    head = f"a head with num_labels={classes}" if classes else "a language model's head"
    needs = f"num_labels={needed} (QLoRAModel.from_pretrained)" if needed else "a language model"
    raise ConfigError(
        f"train.objective: {settings.objective} requires {needs}, but the model has {head}"
    )


def _in_order(name: str) -> tuple[int, str]:
    return (int(name), "") if name.isdecimal() else (0, name)


# ---- batches -------------------------------------------------------------------------------------


class ScoredData:
    """A data set of sequences with targets, and their micro-batches."""

    def __init__(self, dataset: Dataset, given: Scoring, longest: int) -> None:
        self._dataset = dataset
        self._width = given.width
        self._longest = longest
        if len(dataset) and dataset[0].targets is None:
            raise DataError(
                f"train.objective: {given.objective} requires rows, not token ids: pass a path, or "
                "rows with "
                + ("chosen and rejected" if given.is_paired else "text or messages, and a label")
            )

    @property
    def reference_hash(self) -> str:
        """There is no reference model."""
        return hashlib.sha256(b"").hexdigest()[:16]

    def batches(self, blocks: Sequence[Block], batch_size: int) -> Iterator[PreferenceBatch]:
        """The micro-batches of a step, or of an evaluation."""
        for block in blocks:
            examples = [self._dataset[i] for row in block for i in row]
            longest = max(self._longest, max(map(len, examples)))
            batch = padded_batch([[each] for each in examples], batch_size, longest)
            targets = np.zeros((len(examples), self._width), np.float32)
            for number, each in enumerate(examples):
                if each.targets is not None:
                    targets[number] = each.targets
            ids, mask = (
                array.astype(np.int64) for array in (batch.input_ids, batch.attention_mask)
            )
            samples = ScoreInputs(pooled_rows(ids, mask, None), targets)
            yield PreferenceBatch("loss", batch, samples, sum(map(len, examples)))


@dataclass(frozen=True)
class ScoredLoss:
    """The loss of a data set, per pair or sequence, and its metrics."""

    loss: float
    count: int  # pairs or sequences
    metrics: Mapping[str, float]
    confusion: Confusion | None = None  # of a classifier


def scored_loss(
    model: AdapterModel, executor: Executor, data: ScoredData, rows: Dataset, batch_size: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ScoredLoss:  # fmt: skip
    """The loss of a data set with the current adapter, and its metrics."""
    given = model.options.objective.scoring
    assert given is not None
    targets: list[FloatArray] = []

    def batches() -> Iterator[MicroBatch]:
        for made in data.batches(in_blocks(rows, given, batch_size), batch_size):
            assert isinstance(made.samples, ScoreInputs)
            targets.append(made.samples.targets)
            yield MicroBatch.of_answers(model, made)

    def done(count: int) -> None:
        progress(min(count * batch_size // rows.unit, rows.num_rows), rows.num_rows)

    stats, scores = executor.scores(batches(), done)
    loss = float(stats[STATS_LOSS]) / max(float(stats[STATS_TOKENS]), 1e-30)
    metrics = means(stats[STATS_METRICS:STATS_LENGTH].tolist(), given)
    count = rows.num_rows
    if given.is_paired or given.problem_type == "regression":
        return ScoredLoss(loss, count, metrics)
    confusion = Confusion.of(np.concatenate(scores), np.concatenate(targets), given)
    return ScoredLoss(loss, count, {**metrics, "macro_f1": confusion.macro_f1}, confusion)


_LOGGED = 20  # labels of a confusion matrix in the log


# ---- metrics of a classifier ---------------------------------------------------------------------


@dataclass(frozen=True)
class Confusion:
    """How often each label was predicted for each label, or for several labels per row, its counts.

    For several labels per row, ``matrix`` is (classes, 2, 2), one of its own for each label, as in
    scikit-learn's ``multilabel_confusion_matrix``; else (classes, classes), rows by the true label.
    """

    matrix: npt.NDArray[np.int64]

    @classmethod
    def of(cls, scores: FloatArray, targets: FloatArray, given: Scoring) -> Confusion:
        """Counts predictions, both arrays with a row per sequence."""
        if given.problem_type == "single_label_classification":
            true = targets[:, 0].astype(np.int64)
            size = given.classes
            pairs = true * size + scores.argmax(axis=1)
            return cls(np.bincount(pairs, minlength=size * size).reshape(size, size))
        chosen, true_labels = scores > 0, targets > 0.5
        counts = [
            [((true_labels == t) & (chosen == p)).sum(axis=0) for p in (False, True)]
            for t in (False, True)
        ]
        return cls(np.moveaxis(np.array(counts), -1, 0))

    def by_name(self, labels: Sequence[str]) -> dict[str, dict[str, int]]:
        """Counts by true and predicted label; empty for several labels per row, or for many."""
        if self.matrix.ndim == 3 or len(labels) > _LOGGED:
            return {}
        counts = self.matrix.tolist()
        return {
            true: dict(zip(labels, row, strict=True))
            for true, row in zip(labels, counts, strict=True)
        }

    @property
    def macro_f1(self) -> float:
        """The unweighted mean of the labels' F1, as in scikit-learn.

        Of a single label per row, without labels that neither occur nor are predicted.
        """
        if self.matrix.ndim == 3:
            hits = self.matrix[:, 1, 1]
            wrong = self.matrix[:, 0, 1] + self.matrix[:, 1, 0]
        else:
            hits = np.diag(self.matrix)
            wrong = self.matrix.sum(axis=0) + self.matrix.sum(axis=1) - 2 * hits
        f1 = 2 * hits / np.maximum(2 * hits + wrong, 1)
        occur = hits + wrong > 0
        return float(np.mean(f1 if self.matrix.ndim == 3 else f1[occur]))
