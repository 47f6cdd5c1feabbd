"""Prompts of a data set, completed by a model and scored by reward functions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from qlora_wgpu.config.sections.grpo import GRPOConfig
from qlora_wgpu.data import Dataset, Tokenizer
from qlora_wgpu.generation.sampling import Sampling
from qlora_wgpu.grpo.reward_set import RewardSet
from qlora_wgpu.grpo.rollouts import (
    Completion,
    Prompt,
    Rollout,
    evaluate_completions,
    seed_of,
)

MOST_AT_ONCE = 64  # completions that are sampled at once, if memory allows
SampleCompletions = Callable[..., list[Completion] | None]
"""``sample_completions`` without its engine."""
_EVALUATION = 1 << 40  # numbers of evaluations' seeds are beyond those of generations


def prompt_of(rows: Dataset, number: int) -> Prompt:
    """A prompt of the data."""
    row = rows.prompt_row(number)
    return Prompt(rows[number].input_ids.tolist(), row.prompt, row.columns)


def sampling_of(given: GRPOConfig) -> Sampling:
    """Sampling parameters of the section ``grpo``; seeds are set per completion."""
    return Sampling(
        given.temperature, given.top_k, given.top_p, 0, given.min_p or 0.0,
        given.repetition_penalty,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Completer:
    """Samples completions from the adapter that is active, and scores them."""

    sample: SampleCompletions
    tokenizer: Tokenizer
    rewards: RewardSet
    settings: GRPOConfig
    stop_ids: Collection[int]
    activity: Callable[[str], None]  # is called with the progress

    def complete(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], what: str, size: int,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> Rollout | None:  # fmt: skip
        """Scored completions, of which ``size`` neighbours form a group; None if stopped."""
        completions = self.sample(
            prompts,
            sampling_of(self.settings),
            seeds,
            max_completion_length=self.settings.max_completion_length,
            stop_ids=self.stop_ids,
            is_stopped=is_stopped,
            progress=lambda done: self.activity(f"{what}: {done:,} of {len(prompts):,}"),
        )
        self.activity("")
        if completions is None:
            return None
        texts = [self.tokenizer.decode(completion.ids) for completion in completions]
        self.activity("scoring completions")
        config = replace(self.rewards.advantages, num_generations=size)
        rollout = evaluate_completions(
            prompts, completions, texts, self.rewards.functions, self.rewards.weights, config,
            mask_truncated_completions=self.settings.mask_truncated_completions,
        )  # fmt: skip
        self.activity("")
        return rollout

    def evaluate(self, rows: Dataset, objective: str, seed: int, what: str) -> Rollout:
        """Scored completions of held-out prompts, with the same seeds in each evaluation."""
        size = self.settings.num_generations_eval or self.settings.group_size(objective)
        prompts = [prompt_of(rows, number) for number in range(len(rows)) for _ in range(size)]
        seeds = [seed_of(seed, _EVALUATION, n) for n in range(len(prompts))]
        rollout = self.complete(prompts, seeds, what, size)
        assert rollout is not None
        return rollout
