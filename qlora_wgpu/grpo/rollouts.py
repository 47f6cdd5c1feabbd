"""Rollouts: completions sampled from the current adapter, scored, and made into micro-batches."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.data import Batch, Example
from qlora_wgpu.generation.engine import Engine
from qlora_wgpu.generation.sampling import Sampling
from qlora_wgpu.grpo.advantages import AdvantageConfig, Scores, score
from qlora_wgpu.grpo.rewards import RewardFunction, rewards_of
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.model.batch_encoding import shifted_targets
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.model.steps import PolicyInputs
from qlora_wgpu.ops.policy import Policy, token_weights
from qlora_wgpu.training.batching import padded_batch

Checked = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Prompt:
    """A row of the data."""

    ids: Sequence[int]  # its tokens, up to where the model answers
    shown: Any  # what reward functions get: a string, or messages
    columns: Mapping[str, Any] = field(default_factory=dict)  # the row's other columns

    @property
    def is_chat(self) -> bool:
        """Whether it consists of messages, and its completions of one, too."""
        return not isinstance(self.shown, str)


@dataclass(frozen=True)
class Completion:
    """What the model has answered."""

    ids: Sequence[int]  # its tokens, with the one that ends it
    is_truncated: bool  # whether it has reached the maximum before that


@dataclass(frozen=True, eq=False)
class Rollout:
    """Completions that were sampled together, in the order of their groups."""

    prompts: Sequence[Prompt]  # of each completion
    completions: Sequence[Completion]
    texts: Sequence[str]  # of each completion
    scores: Scores
    is_learned: npt.NDArray[np.bool_]  # whether each completion has a loss

    def __len__(self) -> int:
        return len(self.completions)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each completion that have a loss."""
        return np.array([len(c.ids) for c in self.completions]) * self.is_learned

    def metrics(self, names: list[str]) -> dict[str, float]:
        """What TRL logs of it, by its names."""
        lengths = np.array([len(c.ids) for c in self.completions])
        is_cut = np.array([c.is_truncated for c in self.completions])
        ended = lengths[~is_cut] if not is_cut.all() else np.zeros(1)
        shown = {
            "completions/mean_length": float(lengths.mean()),
            "completions/min_length": float(lengths.min()),
            "completions/max_length": float(lengths.max()),
            "completions/clipped_ratio": float(is_cut.mean()),
            "completions/mean_terminated_length": float(ended.mean()),
            "completions/min_terminated_length": float(ended.min()),
            "completions/max_terminated_length": float(ended.max()),
        }
        return shown | self.scores.metrics(names)


def seed_of(*numbers: int) -> int:
    """A seed of 32 bits that follows from some numbers."""
    digest = hashlib.sha256(np.array(numbers, "<i8").tobytes()).digest()
    return int.from_bytes(digest[:4], "little")


def sample_completions(
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    seeds: Sequence[int],
    *,
    max_completion_length: int,
    stop_ids: Collection[int],
) -> list[Completion]:
    """A completion of each prompt, sampled with its own seed, whatever is sampled with it."""
    requests = [
        engine.add(
            prompt.ids,
            _with_seed(sampling, seed),
            max_new_tokens=max_completion_length,
            stop_ids=stop_ids,
        )
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    while not engine.is_idle:
        engine.step()
    return [
        Completion(
            request.ids if request.stop_token is None else [*request.ids, request.stop_token],
            request.finish_reason == "length",
        )
        for request in requests
    ]


def _with_seed(sampling: Sampling, seed: int) -> Sampling:
    return Sampling(**{**vars(sampling), "seed": seed})


def evaluate_completions(
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    texts: Sequence[str],
    functions: Mapping[str, RewardFunction],
    weights: Sequence[float],
    config: AdvantageConfig,
    *,
    mask_truncated_completions: bool = False,
) -> Rollout:
    """Scores completions, whose groups are neighbours."""
    columns = {key: [p.columns.get(key) for p in prompts] for key in prompts[0].columns}
    given: dict[str, Sequence[Any]] = {
        **columns,
        "prompts": [prompt.shown for prompt in prompts],
        "completions": [
            [{"role": "assistant", "content": text}] if prompt.is_chat else text
            for prompt, text in zip(prompts, texts, strict=True)
        ],
        "completion_ids": [list(completion.ids) for completion in completions],
    }
    scores = score(rewards_of(functions, given), np.array(weights, np.float64), config)
    kept = np.array([not (mask_truncated_completions and c.is_truncated) for c in completions])
    return Rollout(prompts, completions, texts, scores, kept)


# ---- micro-batches -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PolicyBatch:
    """A micro-batch of completions, as a step takes it."""

    batch: Batch
    ids: npt.NDArray[np.int64]  # (batch, seq)
    targets: npt.NDArray[np.int64]  # (batch, seq)
    mask: npt.NDArray[np.int64]  # (batch, seq)
    policy: PolicyInputs
    tokens: int  # without padding


class RolloutBatches:
    """A rollout's micro-batches, in rows of one completion each.

    Log probabilities of the sampling adapter and of the reference are computed once, when it is
    made: before the adapter is updated.
    """

    def __init__(
        self,
        model: QLoRAModel,
        rollout: Rollout,
        policy: Policy,
        *,
        batch_size: int,
        longest: int,
        max_completion_length: int,
    ) -> None:
        """Computes log probabilities.

        Args:
            model: With the adapter that has sampled the completions.
            rollout: Its completions; ``batch_size`` divides their number.
            policy: The objective.
            batch_size: Completions of a micro-batch.
            longest: The maximum number of tokens of a row.
            max_completion_length: As in ``token_weights``.
        """
        self._rollout, self._policy = rollout, policy
        self._batch_size, self._max_completion_length = batch_size, max_completion_length
        starts = range(0, len(rollout), batch_size)
        self._collated = [self._collate(first, longest) for first in starts]
        self._checked: list[Checked] = []
        for batch in self._collated:
            ids, labels, mask = (
                np.asarray(a, np.int64)
                for a in (batch.input_ids, batch.labels, batch.attention_mask)
            )
            self._checked.append((ids, shifted_targets(labels, mask), mask))
        self._old = [model.token_logps(*checked) for checked in self._checked]
        self._reference = [np.zeros_like(logps) for logps in self._old]
        if policy.has_reference:
            with model.disable_adapter():
                self._reference = [model.token_logps(*checked) for checked in self._checked]

    def __len__(self) -> int:
        return len(self._collated)

    def __iter__(self) -> Iterator[PolicyBatch]:
        return map(self._made, range(len(self)))

    def _collate(self, first: int, longest: int) -> Batch:
        rollout = self._rollout
        rows = []
        for number in range(first, first + self._batch_size):
            prompt, completion = rollout.prompts[number], rollout.completions[number]
            ids = np.array([*prompt.ids, *completion.ids], np.int32)
            labels = ids.copy()
            labels[: len(prompt.ids) if rollout.is_learned[number] else None] = IGNORE_INDEX
            rows.append([Example(ids, labels)])
        return padded_batch(rows, self._batch_size, longest)

    def _made(self, number: int) -> PolicyBatch:
        first = number * self._batch_size
        own = slice(first, first + self._batch_size)
        lengths = self._rollout.lengths
        items = lengths.sum() / len(self)
        present = lengths[own] > 0  # samples without a label are none to the kernels
        weights, shares = token_weights(
            self._policy.loss_type, lengths[own], items, self._max_completion_length
        )
        ids, targets, mask = self._checked[number]
        advantages = self._rollout.scores.advantages[own].astype(np.float32)
        policy = PolicyInputs(
            _whole(shares, present), weights[present], advantages[present], self._old[number],
            self._reference[number],
        )  # fmt: skip
        tokens = int((mask > 0).sum())
        return PolicyBatch(self._collated[number], ids, targets, mask, policy, tokens)


def _whole(shares: FloatArray, present: npt.NDArray[np.bool_]) -> FloatArray:
    """The shares of completions with labels, which add up to those of all."""
    kept = shares[present]
    missing = shares.sum() - kept.sum()
    return kept + np.float32(missing / max(len(kept), 1))
