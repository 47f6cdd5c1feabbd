"""The options of a step from the settings, and the batches of DPO, ORPO and KTO."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from qlora_wgpu.config import TrainConfig
from qlora_wgpu.data import Batch, Dataset, Example
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.model.batch_encoding import shifted_targets
from qlora_wgpu.model.image_inputs import ImageInputs
from qlora_wgpu.model.steps import PreferenceInputs, ScoreInputs, TrainingOptions
from qlora_wgpu.ops.loss import Objective
from qlora_wgpu.ops.policy import Policy
from qlora_wgpu.ops.preference import Preference
from qlora_wgpu.ops.score import Scoring
from qlora_wgpu.training.batching import padded_batch
from qlora_wgpu.training.images import BatchImages

# ---- settings ------------------------------------------------------------------------------------


def training_options(
    settings: TrainConfig, *, weighted: bool = False, policy: Policy | None = None
) -> TrainingOptions:
    """Options of training steps, from the ``train`` section; ``weighted`` rows have weights."""
    preference, scoring = preference_of(settings), scoring_of(settings)
    return TrainingOptions(
        checkpointing=settings.gradient_checkpointing,
        objective=Objective(
            settings.label_smoothing_factor,
            settings.z_loss_weight,
            weighted=weighted,
            confidence=settings.loss == "dft",
            preference=preference,
            policy=policy,
            scoring=scoring,
        ),
        noise=settings.neftune_noise_alpha,
        router_aux_loss_coef=(
            0.0 if preference or policy or scoring else settings.router_aux_loss_coef
        ),
    )


def preference_of(settings: TrainConfig) -> Preference | None:
    """The preference objective (DPO, ORPO or KTO); None for other training."""
    if settings.objective not in ("dpo", "orpo", "kto"):
        return None
    return Preference(
        settings.objective,
        settings.loss,
        settings.beta,
        settings.label_smoothing,
        settings.desirable_weight,
        settings.undesirable_weight,
    )


_CLASSES = 2  # of a classifier whose labels are unknown, as in transformers


def scoring_of(settings: TrainConfig) -> Scoring | None:
    """The objective over sequences; None for others."""
    if not settings.is_scored:
        return None
    if settings.objective == "reward":
        return Scoring("reward", center=settings.center_rewards_coefficient)
    labels, weights = settings.labels, settings.class_weights
    unknown = 1 if settings.problem_type == "regression" else _CLASSES
    return Scoring(
        "classification",
        len(labels) if labels else unknown,
        settings.problem_type,
        () if weights is None else tuple(weights),
        labels=tuple(labels or ()),
    )


def samples_of(settings: TrainConfig) -> Preference | Scoring | None:
    """The objective over answers or sequences; None for supervised training."""
    return scoring_of(settings) or preference_of(settings)


# ---- answers -------------------------------------------------------------------------------------

FloatArray = npt.NDArray[np.float32]
Block = list[tuple[int, ...]]


class KLPairs(Sequence[Example]):
    """The prompt of each example with the answer of an earlier one that has another prompt.

    An example keeps its own answer if no other one has a label after its prompt.

    KTO estimates its KL term on them. The pairing depends on the data only, so the reference model
    computes each one once.
    """

    def __init__(self, dataset: Dataset, longest: int) -> None:
        self._dataset = dataset
        self._longest = longest
        present = np.flatnonzero(dataset.lengths)
        self._partner = dict(zip(present.tolist(), np.roll(present, 1).tolist(), strict=True))

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Example:  # type: ignore[override]
        own = self._dataset[index]
        if not len(own):
            return own
        prompt = own.input_ids[: _answer_begins(own)]  # which has all images
        partner = self._partner[index]
        while partner != index:
            other = self._dataset[partner]
            begins = _answer_begins(other)
            is_same = np.array_equal(other.input_ids[:begins], prompt)
            is_same = is_same and other.images == own.images
            pair = self._with_answer(prompt, other.input_ids[begins:], other.labels[begins:])
            # A truncated prompt may be empty: then nothing predicts the answer's first token.
            if pair.num_label_tokens and not is_same:
                return replace(pair, images=own.images)
            partner = self._partner[partner]
        return own

    def _with_answer(
        self, prompt: npt.NDArray[np.int32], ids: npt.NDArray[np.int32],
        labels: npt.NDArray[np.int32],
    ) -> Example:  # fmt: skip
        masked = np.full(len(prompt), IGNORE_INDEX, np.int32)
        all_ids, all_labels = np.concatenate([prompt, ids]), np.concatenate([masked, labels])
        return Example(all_ids[: self._longest], all_labels[: self._longest])


@dataclass(frozen=True, eq=False)
class References:
    """The reference model's summed log probability of each answer, float32."""

    own: FloatArray  # of the data set's examples
    mismatched: FloatArray  # of ``KLPairs``; empty if the objective does not need them

    @classmethod
    def none(cls, count: int) -> References:
        """For an objective without a reference model."""
        return cls(np.zeros(count, np.float32), np.zeros(0, np.float32))


@dataclass(frozen=True, eq=False)
class PreferenceBatch:
    """A micro-batch of answers."""

    # Whether its loss is computed, or before that only its divergence from the reference
    kind: Literal["loss", "divergence"]
    batch: Batch  # its tokens, with the labels of everything that has a loss
    samples: PreferenceInputs | ScoreInputs  # the other inputs of the objective
    tokens: int  # its tokens, without padding
    images: ImageInputs | None = None  # its images, in a run that has any


class PreferenceData:
    """A data set of answers, and their micro-batches."""

    def __init__(
        self, dataset: Dataset, preference: Preference, references: References, longest: int,
        images: BatchImages | None = None,
    ) -> None:  # fmt: skip
        """``references`` are the reference model's log probabilities of the data set."""
        self._images = images
        self._dataset = dataset
        self._preference = preference
        self._references = references
        self._longest = longest
        self._mismatched = KLPairs(dataset, longest)

    @property
    def reference_hash(self) -> str:
        """A hash of the reference model's log probabilities."""
        logps = self._references
        digest = hashlib.sha256(logps.own.tobytes() + logps.mismatched.tobytes())
        return digest.hexdigest()[:16]

    def batches(self, blocks: Sequence[Block], batch_size: int) -> Iterator[PreferenceBatch]:
        """The micro-batches of a step, or of an evaluation."""
        if self._preference.has_divergence:
            for block in blocks:
                rows = [[self._mismatched[i] for i in row] for row in block]
                yield self._batch("divergence", block, rows, batch_size, 0.0)
        share = self._share(blocks) if self._preference.learns_prompts else 0.0
        for block in blocks:
            rows = [[self._dataset[i] for i in row] for row in block]
            yield self._batch("loss", block, rows, batch_size, share)

    def _share(self, blocks: Sequence[Block]) -> float:
        """Pairs per token of the chosen answers and their prompts.

        ORPO averages one loss over tokens and the other over pairs; the kernel divides their sum by
        the number of pairs.
        """
        chosen = [i for block in blocks for row in block for i in row if i % 2 == 0]
        tokens = int((self._dataset.lengths[chosen] - 1).sum())
        if self._images is not None:
            tokens = sum(self._all_tokens(self._dataset[i]).num_label_tokens for i in chosen)
        return len(chosen) / max(tokens, 1)

    def _all_tokens(self, example: Example) -> Example:
        """An example with all its tokens as labels, except placeholders of images."""
        labels = example.input_ids
        if self._images is not None:
            labels = np.where(labels == self._images.placeholder, IGNORE_INDEX, labels)
        return Example(example.input_ids, labels)

    def _numbers(
        self, numbers: npt.NDArray[np.int64], is_chosen: npt.NDArray[np.bool_], share: float
    ) -> npt.NDArray[np.float64 | np.bool_]:
        """The objective's number for each answer (``PreferenceInputs.numbers``)."""
        if self._preference.learns_prompts:
            return np.where(is_chosen, share, 0.0)
        if not self._preference.is_paired:
            return is_chosen
        return np.array([not _answer_begins(self._dataset[i]) for i in numbers])

    def _batch(
        self,
        kind: Literal["loss", "divergence"],
        block: Block,
        rows: list[list[Example]],
        batch_size: int,
        share: float,
    ) -> PreferenceBatch:
        numbers = np.array([i for row in block for i in row])
        is_chosen = numbers % 2 == 0
        logps = self._references
        references = (logps.mismatched if kind == "divergence" else logps.own)[numbers]
        values = self._numbers(numbers, is_chosen, share)
        longest = max(self._longest, max(sum(map(len, row)) for row in rows))
        batch = padded_batch(rows, batch_size, longest)
        prompts = None
        if share:
            answers = _targets(batch)
            labelled = [
                [e if i % 2 else self._all_tokens(e) for i, e in zip(numbers_of, row, strict=True)]
                for numbers_of, row in zip(block, rows, strict=True)
            ]
            batch = padded_batch(labelled, batch_size, longest)
            prompts = (_targets(batch) != IGNORE_INDEX) & (answers == IGNORE_INDEX)
        samples = PreferenceInputs(references, values.astype(np.float32), prompts)
        images = None
        if self._images is not None:
            images = self._images(rows, batch.input_ids, batch.attention_mask)
        tokens = sum(len(e) for row in rows for e in row)
        return PreferenceBatch(kind, batch, samples, tokens, images)


def in_blocks(dataset: Dataset, preference: Preference | Scoring, batch_size: int) -> list[Block]:
    """Micro-batches of all answers, the longest first; pairs stay together in two rows."""
    lengths = dataset.lengths
    if preference.is_paired:
        size = max(batch_size // 2, 1)
        order = np.argsort(-lengths.reshape(-1, 2).max(axis=1), kind="stable").tolist()
        units: list[Block] = [[(2 * i,), (2 * i + 1,)] for i in order]
    else:
        size, present = batch_size, np.flatnonzero(lengths)
        order = present[np.argsort(-lengths[present], kind="stable")].tolist()
        units = [[(i,)] for i in order]
    groups = (units[first : first + size] for first in range(0, len(units), size))
    return [[row for unit in group for row in unit] for group in groups]


def _answer_begins(example: Example) -> int:
    return int(np.argmax(example.labels != IGNORE_INDEX))


def _targets(batch: Batch) -> npt.NDArray[np.int64]:
    mask = batch.attention_mask.astype(np.int64)
    return shifted_targets(batch.labels.astype(np.int64), mask)
