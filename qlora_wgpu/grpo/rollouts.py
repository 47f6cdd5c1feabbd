"""Rollouts: completions sampled from the current adapter, scored, and made into micro-batches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.data import Example
from qlora_wgpu.generation.engine import Engine
from qlora_wgpu.generation.sampling import Sampling
from qlora_wgpu.grpo.advantages import AdvantageConfig, Scores, score
from qlora_wgpu.grpo.rewards import RewardFunction, rewards_of
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.model.batch_encoding import shifted_targets
from qlora_wgpu.model.steps import PolicyInputs
from qlora_wgpu.ops.policy import Policy, token_weights
from qlora_wgpu.training.batching import padded_batch
from qlora_wgpu.training.executor import Executor, MicroBatch

IntArray = npt.NDArray[np.int64]
Checked = tuple[IntArray, IntArray, IntArray]  # ids, targets and mask
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Prompt:
    """A prompt of the data."""

    ids: Sequence[int]  # its tokens
    shown: Any  # the prompt for reward functions: a string, or messages
    columns: Mapping[str, Any] = field(default_factory=dict)  # the row's other columns

    @property
    def is_chat(self) -> bool:
        """Whether it consists of messages; its completions are then one message each."""
        return not isinstance(self.shown, str)


@dataclass(frozen=True)
class Completion:
    """A sampled completion."""

    ids: Sequence[int]  # its tokens, with the one that ends it
    is_truncated: bool  # whether it reached the maximum length


@dataclass(frozen=True, eq=False)
class Rollout:
    """Completions that were sampled together; those of a prompt are consecutive."""

    prompts: Sequence[Prompt]  # of each completion
    completions: Sequence[Completion]
    texts: Sequence[str]  # of each completion
    scores: Scores
    has_loss: npt.NDArray[np.bool_]  # whether each completion has a loss
    config: AdvantageConfig = field(default_factory=lambda: AdvantageConfig(1))

    def __len__(self) -> int:
        return len(self.completions)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each completion that have a loss."""
        return np.array([len(c.ids) for c in self.completions]) * self.has_loss

    def penalized(self, penalties: npt.NDArray[np.float64]) -> Rollout:
        """The rollout with advantages of RLOO's rewards less these penalties."""
        given = self.scores
        return replace(self, scores=score(given.rewards, given.weights, self.config, penalties))

    def metrics(self, names: Sequence[str]) -> dict[str, float]:
        """TRL's metrics of the completions and rewards, by its names."""
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
        return shown | self.scores.metrics(list(names))


def seed_of(*numbers: int) -> int:
    """A seed of 32 bits, a hash of some numbers."""
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
    is_stopped: Callable[[], bool] = lambda: False,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Completion] | None:
    """A completion of each prompt, which depends on its own seed alone; None if stopped."""
    requests = [
        engine.add(
            prompt.ids,
            replace(sampling, seed=seed),
            max_new_tokens=max_completion_length,
            stop_ids=stop_ids,
        )
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    while not engine.is_idle:
        if is_stopped():
            for request in requests:
                request.cancel()
            engine.step()
            return None
        engine.step()
        progress(sum(request.finish_reason is not None for request in requests))
    return [
        Completion(
            request.ids if request.stop_token is None else [*request.ids, request.stop_token],
            request.finish_reason == "length",
        )
        for request in requests
    ]


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
    """Scores completions; those of a prompt are consecutive."""
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
    return Rollout(prompts, completions, texts, scores, kept, config)


# ---- micro-batches -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PolicyBatch:
    """A micro-batch of completions."""

    ids: IntArray  # (batch, seq)
    targets: IntArray  # (batch, seq)
    mask: IntArray  # (batch, seq)
    policy: PolicyInputs
    tokens: int  # without padding


@dataclass(frozen=True, eq=False)
class LogProbs:
    """Log probabilities of the targets of some micro-batches, each (batch, seq)."""

    old: Sequence[FloatArray]  # by the adapter that has sampled the completions
    reference: Sequence[FloatArray]  # by the reference model; zeros without one


class RolloutBatches:
    """The micro-batches of completions that were sampled together, a completion per row.

    Log probabilities of the sampling adapter and of the reference model are computed when it is
    made, before the adapter is updated.
    """

    def __init__(
        self,
        executor: Executor,
        rollout: Rollout,
        policy: Policy,
        *,
        batch_size: int,
        longest: int,
        max_completion_length: int,
        reference: FloatArray | None = None,
        known: tuple[FloatArray, FloatArray] | None = None,
    ) -> None:
        """Computes log probabilities, unless they are known.

        Args:
            executor: Computes with the adapter that has sampled the completions.
            rollout: The completions; their number is a multiple of ``batch_size``.
            policy: The objective.
            batch_size: Completions of a micro-batch.
            longest: Maximum number of tokens of a row.
            max_completion_length: As in ``token_weights``.
            reference: Flat parameters of the reference model's adapter, if the policy has one.
            known: Old and reference log probabilities that were computed before, flat.
        """
        self._policy, self._batch_size = policy, batch_size
        self._max_completion_length = max_completion_length
        self._checked = [
            self._collate(rollout, first, longest) for first in range(0, len(rollout), batch_size)
        ]
        self.logps = (
            self._log_probs(executor, reference)
            if known is None
            else LogProbs(self._shaped(known[0]), self._shaped(known[1]))
        )
        if known is None and policy.loss_type == "rloo" and policy.has_reference:
            rollout = rollout.penalized(policy.beta * self._divergences())
        self.rollout = rollout

    def __len__(self) -> int:
        return len(self._checked)

    def __iter__(self) -> Iterator[PolicyBatch]:
        return iter(self.blocks(range(len(self))))

    @property
    def kl(self) -> float | None:
        """RLOO's mean KL divergence per token; None for objectives that compute it in a step."""
        if self._policy.loss_type != "rloo" or not self._policy.has_reference:
            return None
        return float(self._divergences().sum() / max(self.rollout.lengths.sum(), 1))

    def blocks(self, numbers: Sequence[int]) -> list[PolicyBatch]:
        """The micro-batches of a step, by their indices."""
        lengths, size = self.rollout.lengths, self._batch_size
        items = max(lengths.sum(), 1) / len(self)
        batches = []
        for n in numbers:
            ids, targets, mask = self._checked[n]
            own = slice(n * size, (n + 1) * size)
            weights, shares = token_weights(
                self._policy.loss_type, lengths[own], items, self._max_completion_length
            )
            policy = PolicyInputs(
                shares, weights, self.rollout.scores.advantages[own].astype(np.float32),
                self.logps.old[n], self.logps.reference[n], lengths[own] > 0,
            )  # fmt: skip
            batches.append(PolicyBatch(ids, targets, mask, policy, int((mask > 0).sum())))
        return batches

    def _collate(self, rollout: Rollout, first: int, longest: int) -> Checked:
        rows = []
        for number in range(first, first + self._batch_size):
            prompt, completion = rollout.prompts[number], rollout.completions[number]
            ids = np.array([*prompt.ids, *completion.ids], np.int32)
            labels = ids.copy()
            labels[: len(prompt.ids) if rollout.has_loss[number] else None] = IGNORE_INDEX
            rows.append([Example(ids, labels)])
        batch = padded_batch(rows, self._batch_size, longest)
        mask = batch.attention_mask.astype(np.int64)
        targets = shifted_targets(batch.labels.astype(np.int64), mask)
        return batch.input_ids.astype(np.int64), targets, mask

    def _shaped(self, flat: FloatArray) -> list[FloatArray]:
        """Log probabilities by micro-batch."""
        ends = np.cumsum([ids.size for ids, _, _ in self._checked])
        parts = np.split(flat, ends[:-1])
        return [
            own.reshape(ids.shape) for own, (ids, _, _) in zip(parts, self._checked, strict=True)
        ]

    def _log_probs(self, executor: Executor, reference: FloatArray | None) -> LogProbs:
        batches = [MicroBatch(*checked, None, 0) for checked in self._checked]
        old = [np.zeros(batch.ids.shape, np.float32) for batch in batches]
        if self._policy.needs_old:
            old = executor.token_logps(batches)
        if not self._policy.has_reference:
            return LogProbs(old, [np.zeros_like(logps) for logps in old])
        assert reference is not None
        return LogProbs(old, executor.token_logps(batches, reference))

    def _divergences(self) -> npt.NDArray[np.float64]:
        """RLOO's KL divergence of each completion, summed over its tokens."""
        pairs = zip(self.logps.old, self.logps.reference, strict=True)
        return np.concatenate([(old - other).sum(axis=1, dtype=np.float64) for old, other in pairs])
