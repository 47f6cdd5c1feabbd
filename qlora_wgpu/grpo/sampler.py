"""Rollouts of a run: prompts of a generation are completed, scored and made into micro-batches."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.data import Tokenizer
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.generation.engine import Engine
from qlora_wgpu.grpo.advantages import Scores
from qlora_wgpu.grpo.completer import MOST_AT_ONCE, Completer, SampleCompletions, prompt_of
from qlora_wgpu.grpo.reward_set import RewardSet
from qlora_wgpu.grpo.rollouts import (
    Completion,
    Rollout,
    RolloutBatches,
    sample_completions,
    seed_of,
)
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.training.executor import MicroBatch
from qlora_wgpu.training.policies import RolloutPlan, policy_of

if TYPE_CHECKING:
    from qlora_wgpu.training.run import Run


class RolloutSampler:
    """Samples and scores the completions that a run's steps train on."""

    def __init__(
        self, run: Run, rewards: RewardSet, tokenizer: Tokenizer, stop_ids: frozenset[int],
        at_once: int = MOST_AT_ONCE, sample: SampleCompletions | None = None,
    ) -> None:  # fmt: skip
        """Samples nothing yet.

        Completions are sampled by ``sample``, or with an engine, at most ``at_once``.
        """
        assert isinstance(run.plan, RolloutPlan)
        policy = policy_of(run.config)
        assert policy is not None
        self._run, self._model, self._plan, self._policy = run, run.model, run.plan, policy
        self._rewards, self._tokenizer, self._stop_ids = rewards, tokenizer, stop_ids
        self._at_once, self._sample = at_once, sample
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
        rollout = self._completer.complete(
            prompts, seeds, "sampling completions", size, lambda: self._run.stop.requested
        )
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
                each.tokens, samples=each.policy,
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
        run = self._run
        assert run.held_out is not None
        rollout = self._completer.evaluate(
            run.held_out, run.config.train.objective, self._plan.seed, "evaluating by reward"
        )
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

    @cached_property
    def _completer(self) -> Completer:
        run, sample = self._run, self._sample
        if sample is None:
            assert isinstance(self._model, QLoRAModel)
            completions = self._plan.num_prompts * self._plan.num_generations
            longest = max(each.longest for each in [run.rows, *filter(None, [run.held_out])])
            engine = Engine(
                self._model, min(self._at_once, completions),
                longest + self._plan.max_completion_length, packs_weights=False,
            )  # fmt: skip
            sample = partial(sample_completions, engine)
        return Completer(
            sample, self._tokenizer, self._rewards, run.config.grpo, self._stop_ids,
            run.events.activity,
        )  # fmt: skip

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
