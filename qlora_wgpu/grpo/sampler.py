"""Rollouts of a run: prompts of a generation are completed, scored and made into micro-batches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.config.sections.grpo import GRPOConfig
from qlora_wgpu.data import Tokenizer
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.generation.engine import Engine
from qlora_wgpu.generation.sampling import Sampling
from qlora_wgpu.grpo.advantages import Scores
from qlora_wgpu.grpo.reward_set import RewardSet
from qlora_wgpu.grpo.rollouts import (
    Completion,
    Prompt,
    Rollout,
    RolloutBatches,
    evaluate_completions,
    sample_completions,
    seed_of,
)
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.training.executor import MicroBatch
from qlora_wgpu.training.policies import RolloutPlan, policy_of

if TYPE_CHECKING:
    from qlora_wgpu.data import Dataset
    from qlora_wgpu.training.run import Run

MOST_AT_ONCE = 64  # completions that are sampled at once, if memory allows
Complete = Callable[..., list[Completion] | None]
"""``sample_completions`` without its engine."""
_EVALUATION = 1 << 40  # numbers of evaluations' seeds are beyond those of generations


class RolloutSampler:
    """Samples and scores the completions that a run's steps train on."""

    def __init__(
        self, run: Run, rewards: RewardSet, tokenizer: Tokenizer, stop_ids: frozenset[int],
        at_once: int = MOST_AT_ONCE, complete: Complete | None = None,
    ) -> None:  # fmt: skip
        """Samples nothing yet.

        Completions are sampled by ``complete``, or with an engine, at most ``at_once``.
        """
        assert isinstance(run.plan, RolloutPlan)
        policy = policy_of(run.config)
        assert policy is not None
        self._run, self._model, self._plan, self._policy = run, run.model, run.plan, policy
        self._rewards, self._tokenizer, self._stop_ids = rewards, tokenizer, stop_ids
        self._sampling = sampling_of(run.config.grpo)
        self._at_once, self._complete = at_once, complete
        self._generation = -1  # the one that the batches are of
        self._batches: RolloutBatches | None = None
        self._metrics: dict[int, Mapping[str, float]] = {}
        self._seconds = 0.0
        self._reference: npt.NDArray[np.float32] | None = None
        if policy.has_reference and run.config.lora.init_from is not None:
            self._reference = run.model.read_flat(run.model.adapter.parameters).copy()
        elif policy.has_reference:
            self._reference = run.executor.neutral()

    # -- steps -------------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """The time that sampling and scoring have taken since the first step."""
        return self._seconds

    def begin(self, step: int) -> bool:
        """Samples and scores a step's completions if they are not there; False if stopped."""
        generation, _ = self._plan.generation_of(step)
        if generation == self._generation:
            return True
        began = time.perf_counter()
        size = self._plan.num_generations
        numbers = [n for n in self._plan.prompts_of(generation) for _ in range(size)]
        prompts = [prompt_of(self._run.rows, number) for number in numbers]
        seeds = [seed_of(self._plan.seed, generation, n) for n in range(len(prompts))]
        rollout = self._sampled(prompts, seeds, "sampling completions", size)
        self._seconds += time.perf_counter() - began
        if rollout is None:
            return False
        self._batches = self._batched(rollout)
        self._generation = generation
        rollout = self._batches.rollout
        shown = dict(rollout.metrics(list(self._rewards.functions)))
        if (kl := self._batches.kl) is not None:
            shown["kl"] = kl
        self._metrics[step] = shown
        self._log(step, rollout, size)
        return True

    def batches(self, step: int) -> Sequence[MicroBatch]:
        """The micro-batches of a step, after ``begin``."""
        assert self._batches is not None
        _, index = self._plan.generation_of(step)
        made = self._batches.blocks(self._plan.blocks_of(index))
        return [
            MicroBatch(
                each.ids, each.targets, each.mask,
                self._plan.dropout_key(step, n) if self._model.is_random else None,
                each.tokens, policy=each.policy,
            )
            for n, each in enumerate(made)
        ]  # fmt: skip

    def metrics(self, step: int) -> Mapping[str, float]:
        """TRL's metrics of the completions that were sampled for this step; empty for none."""
        return self._metrics.pop(step, {})

    def close(self) -> None:
        """Ends the processes of reward functions in files."""
        self._rewards.close()

    # -- evaluations -------------------------------------------------------------------------------

    def evaluate(self, step: int) -> Mapping[str, float]:
        """TRL's metrics of completions of the held-out prompts, with the same seeds each time."""
        run, given = self._run, self._run.config.grpo
        assert run.held_out is not None
        size = given.num_generations_eval or self._plan.num_generations
        chosen = [n for n in range(len(run.held_out)) for _ in range(size)]
        prompts = [prompt_of(run.held_out, number) for number in chosen]
        seeds = [seed_of(self._plan.seed, _EVALUATION, n) for n in range(len(prompts))]
        rollout = self._sampled(prompts, seeds, "evaluating by reward", size, stops=False)
        assert rollout is not None
        return rollout.metrics(list(self._rewards.functions))

    # -- checkpoints within a generation -----------------------------------------------------------

    def tensors(self, step: int) -> Mapping[str, npt.NDArray[Any]]:
        """What later steps need of the completions after this one; empty if that is nothing."""
        generation, _ = self._plan.generation_of(step + 1)
        if self._batches is None or generation != self._generation or not step:
            return {}
        rollout, logps = self._batches.rollout, self._batches.logps
        ids = [np.asarray(c.ids, np.int32) for c in rollout.completions]
        return {
            "ids": np.concatenate(ids),
            "lengths": np.array([len(each) for each in ids], np.int32),
            "is_truncated": np.array([c.is_truncated for c in rollout.completions], np.int32),
            "advantages": rollout.scores.advantages.astype(np.float32),
            "old": np.concatenate([each.ravel() for each in logps.old]),
            "reference": np.concatenate([each.ravel() for each in logps.reference]),
        }

    def restore(self, step: int, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restores what ``tensors`` has returned after this step."""
        generation, index = self._plan.generation_of(step + 1)
        if not index:
            return
        size = self._plan.num_generations
        numbers = [n for n in self._plan.prompts_of(generation) for _ in range(size)]
        prompts = [prompt_of(self._run.rows, number) for number in numbers]
        try:
            ends = np.cumsum(tensors["lengths"])
            ids = np.split(tensors["ids"], ends[:-1])
            flags = tensors["is_truncated"].astype(bool).tolist()
            completions = [
                Completion(own.tolist(), cut) for own, cut in zip(ids, flags, strict=True)
            ]
            advantages = tensors["advantages"].astype(np.float64)
            if len(completions) != len(prompts):
                raise KeyError("lengths")
            flats = tensors["old"], tensors["reference"]
        except KeyError as err:
            raise CheckpointError(
                f"the checkpoint of step {step} lacks the completions that were sampled before it "
                f"({err})"
            ) from err
        none = np.zeros((len(prompts), 1))
        scores = Scores(none, np.ones(1), advantages, np.zeros(len(prompts), np.bool_))
        masked = self._run.config.grpo.mask_truncated_completions
        kept = np.array([not (masked and c.is_truncated) for c in completions])
        rollout = Rollout(prompts, completions, [""] * len(prompts), scores, kept)
        self._batches = self._batched(rollout, flats)
        self._generation = generation

    # -- sampling ----------------------------------------------------------------------------------

    def _batched(
        self, rollout: Rollout, flats: tuple[npt.NDArray[Any], npt.NDArray[Any]] | None = None
    ) -> RolloutBatches:
        given: dict[str, Any] = {
            "batch_size": self._plan.batch_size,
            "longest": self._run.longest,
            "max_completion_length": self._plan.max_completion_length,
        }
        if flats is None:
            given["reference"] = self._reference
        return RolloutBatches(self._run.executor, rollout, self._policy, known=flats, **given)

    def _sampled(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], what: str, size: int, *,
        stops: bool = True,
    ) -> Rollout | None:  # fmt: skip
        """Scored completions of prompts, or None if the run was stopped meanwhile."""
        run, given = self._run, self._run.config.grpo
        activity = run.events.activity
        complete = self._complete or self._with_engine
        completions = complete(
            prompts,
            self._sampling,
            seeds,
            max_completion_length=given.max_completion_length,
            stop_ids=self._stop_ids,
            is_stopped=lambda: stops and run.stop.requested,
            progress=lambda done: activity(f"{what}: {done:,} of {len(prompts):,}"),
        )
        activity("")
        if completions is None:
            return None
        texts = [self._tokenizer.decode(completion.ids) for completion in completions]
        activity("scoring completions")
        config = replace(self._rewards.advantages, num_generations=size)
        rollout = evaluate_completions(
            prompts, completions, texts, self._rewards.functions, self._rewards.weights, config,
            mask_truncated_completions=given.mask_truncated_completions,
        )  # fmt: skip
        activity("")
        return rollout

    @cached_property
    def _with_engine(self) -> Complete:
        rows = [self._run.rows, *filter(None, [self._run.held_out])]
        longest = max(each.longest for each in rows)
        completions = self._plan.num_prompts * self._plan.num_generations
        assert isinstance(self._model, QLoRAModel)
        engine = Engine(
            self._model, min(self._at_once, completions),
            longest + self._plan.max_completion_length, packs_weights=False,
        )  # fmt: skip
        return partial(sample_completions, engine)

    def _log(self, step: int, rollout: Rollout, size: int) -> None:
        """Writes completions with their rewards to ``samples.jsonl``."""
        shown = len(rollout) if self._run.config.grpo.log_completions else size
        names = list(self._rewards.functions)
        for number in range(shown):
            prompt = rollout.prompts[number].shown
            if not isinstance(prompt, str):
                prompt = self._tokenizer.decode(list(rollout.prompts[number].ids))
            rewards = rollout.scores.rewards[number].tolist()
            self._run.folder.texts.append({
                "step": step,
                "prompt": prompt,
                "expected": "",
                "text": rollout.texts[number],
                "rewards": {
                    name: None if math.isnan(value) else value
                    for name, value in zip(names, rewards, strict=True)
                },
                "advantage": float(rollout.scores.advantages[number]),
            })  # fmt: skip


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
