"""What the settings ask a step to compute, and what objectives over answers read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from qlora_wgpu.config import TrainConfig
from qlora_wgpu.data import Batch, Dataset, Example
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.model.batch_encoding import shifted_targets
from qlora_wgpu.model.steps import PreferenceInputs, TrainingOptions
from qlora_wgpu.ops.loss import Objective
from qlora_wgpu.ops.preference import Preference
from qlora_wgpu.training.batching import padded_batch

# ---- settings ------------------------------------------------------------------------------------


def training_options(settings: TrainConfig, *, weighted: bool = False) -> TrainingOptions:
    """Options of training steps, from the ``train`` section; rows may have weights."""
    preference = preference_of(settings)
    return TrainingOptions(
        checkpointing=settings.gradient_checkpointing,
        objective=Objective(
            settings.label_smoothing_factor,
            settings.z_loss_weight,
            weighted=weighted,
            confidence=settings.loss == "dft",
            preference=preference,
        ),
        noise=settings.neftune_noise_alpha,
        router_aux_loss_coef=0.0 if preference else settings.router_aux_loss_coef,
    )


def preference_of(settings: TrainConfig) -> Preference | None:
    """The objective over answers, if it is one."""
    if settings.objective == "sft":
        return None
    return Preference(
        settings.objective,
        settings.loss,
        settings.beta,
        settings.label_smoothing,
        settings.desirable_weight,
        settings.undesirable_weight,
    )


# ---- answers -------------------------------------------------------------------------------------

FloatArray = npt.NDArray[np.float32]
Block = list[tuple[int, ...]]


class KLPairs(Sequence[Example]):
    """The prompt of each example with the answer of one before it that has another prompt.

    Its own answer stands where no other one has a token that is predicted.

    KTO measures on them how far the model is from the reference where nothing is learnt. Which
    answer that is follows from the data alone, so that the reference has to see each but once.
    """

    def __init__(self, dataset: Dataset, longest: int) -> None:
        """Finds the answers."""
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
        prompt = own.input_ids[: _answer_begins(own)]
        partner = self._partner[index]
        while partner != index:
            other = self._dataset[partner]
            begins = _answer_begins(other)
            made = self._with_answer(prompt, other.input_ids[begins:], other.labels[begins:])
            # Where prompts are cut away, a first token has none before it to predict it.
            if made.num_label_tokens and not np.array_equal(other.input_ids[:begins], prompt):
                return made
            partner = self._partner[partner]
        return own

    def _with_answer(
        self, prompt: npt.NDArray[np.int32], ids: npt.NDArray[np.int32],
        labels: npt.NDArray[np.int32],
    ) -> Example:  # fmt: skip
        masked = np.full(len(prompt), IGNORE_INDEX, np.int32)
        whole_ids, whole_labels = np.concatenate([prompt, ids]), np.concatenate([masked, labels])
        return Example(whole_ids[: self._longest], whole_labels[: self._longest])


@dataclass(frozen=True, eq=False)
class References:
    """What the reference says, float32: the summed log probability of each example's answer."""

    own: FloatArray  # of the data set's examples
    mismatched: FloatArray  # of ``KLPairs``; empty where the objective has no use for them

    @classmethod
    def none(cls, count: int) -> References:
        """Of an objective that has no reference."""
        return cls(np.zeros(count, np.float32), np.zeros(0, np.float32))


@dataclass(frozen=True, eq=False)
class PreferenceBatch:
    """A micro-batch of answers."""

    # Whether its loss is computed, or only, before that, its divergence from the reference
    kind: Literal["loss", "divergence"]
    batch: Batch  # its tokens; labels are all that has a loss
    samples: PreferenceInputs  # what is known of its answers
    tokens: int  # its tokens, padding not counted


class PreferenceData:
    """A data set of answers, of which micro-batches are made."""

    def __init__(
        self, dataset: Dataset, preference: Preference, references: References, longest: int
    ) -> None:
        """Takes what is known of the answers."""
        self._dataset = dataset
        self._preference = preference
        self._references = references
        self._longest = longest
        self._mismatched = KLPairs(dataset, longest)

    @property
    def reference_hash(self) -> str:
        """A hash of what the reference says."""
        known = self._references
        digest = hashlib.sha256(known.own.tobytes() + known.mismatched.tobytes())
        return digest.hexdigest()[:16]

    def batches(self, blocks: Sequence[Block], batch_size: int) -> Iterator[PreferenceBatch]:
        """The micro-batches of a step, or of an evaluation."""
        if self._preference.has_divergence:
            for block in blocks:
                rows = [[self._mismatched[i] for i in row] for row in block]
                yield self._made("divergence", block, rows, batch_size, 0.0)
        share = self._share(blocks) if self._preference.learns_prompts else 0.0
        for block in blocks:
            rows = [[self._dataset[i] for i in row] for row in block]
            yield self._made("loss", block, rows, batch_size, share)

    def _share(self, blocks: Sequence[Block]) -> float:
        """Pairs for each token of the chosen answers and their prompts.

        ORPO takes the mean of one over tokens and of the other over pairs: the sum of both is
        divided by the pairs.
        """
        chosen = [i for block in blocks for row in block for i in row if i % 2 == 0]
        return len(chosen) / max(int((self._dataset.lengths[chosen] - 1).sum()), 1)

    def _numbers(
        self, numbers: npt.NDArray[np.int64], is_chosen: npt.NDArray[np.bool_], share: float
    ) -> npt.NDArray[np.float64 | np.bool_]:
        """What the objective reads of each answer (``PreferenceInputs.numbers``)."""
        if self._preference.learns_prompts:
            return np.where(is_chosen, share, 0.0)
        if not self._preference.is_paired:
            return is_chosen
        return np.array([not _answer_begins(self._dataset[i]) for i in numbers])

    def _made(
        self,
        kind: Literal["loss", "divergence"],
        block: Block,
        rows: list[list[Example]],
        batch_size: int,
        share: float,
    ) -> PreferenceBatch:
        numbers = np.array([i for row in block for i in row])
        is_chosen = numbers % 2 == 0
        known = self._references
        references = (known.mismatched if kind == "divergence" else known.own)[numbers]
        values = self._numbers(numbers, is_chosen, share)
        longest = max(self._longest, max(sum(map(len, row)) for row in rows))
        batch = padded_batch(rows, batch_size, longest)
        prompts = None
        if share:
            answers = _targets(batch)
            whole = [
                [_whole(e) if i % 2 == 0 else e for i, e in zip(numbers_of, row, strict=True)]
                for numbers_of, row in zip(block, rows, strict=True)
            ]
            batch = padded_batch(whole, batch_size, longest)
            prompts = (_targets(batch) != IGNORE_INDEX) & (answers == IGNORE_INDEX)
        samples = PreferenceInputs(references, values.astype(np.float32), prompts)
        return PreferenceBatch(kind, batch, samples, sum(len(e) for row in rows for e in row))


def in_blocks(dataset: Dataset, preference: Preference, batch_size: int) -> list[Block]:
    """All answers, the longest first; pairs stay together, one row below the other."""
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


def _whole(example: Example) -> Example:
    """An example of which every token is learnt."""
    return Example(example.input_ids, example.input_ids)
