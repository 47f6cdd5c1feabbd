"""Evaluation of GRPO and RLOO: completions of held-out prompts, scored by the reward functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from qlora_wgpu.config import Config
from qlora_wgpu.data import Dataset, PromptFormat
from qlora_wgpu.errors import RewardError
from qlora_wgpu.generation.engine import Engine
from qlora_wgpu.grpo.completer import MOST_AT_ONCE, Completer
from qlora_wgpu.grpo.reward_set import RewardSet
from qlora_wgpu.grpo.rollouts import sample_completions
from qlora_wgpu.runs.opening import OpenedModel, load_adapted
from qlora_wgpu.runs.prompts import prompt_for, prompt_of_run
from qlora_wgpu.runs.rewards import reward_models
from qlora_wgpu.runs.workload import GenerationWorkload
from qlora_wgpu.training import Observer
from qlora_wgpu.training.policies import refuse_long_completions

Metrics = Mapping[str, float]


def evaluate_rewards(
    settings: Config, source: OpenedModel, adapter: str | None, prompts: Dataset,
    functions: Sequence[Callable[..., Any]], observer: Observer, *, allow_code: bool,
) -> tuple[int, Metrics, Metrics | None]:  # fmt: skip
    """Completions per model, and the metrics of the base and the adapter, by TRL's names.

    Completions are those of the run's own evaluations: their seeds are the same.
    """
    refuse_long_completions(settings, prompts, None, source.pretrained.config)
    given, objective = settings.grpo, settings.train.objective
    count = len(prompts) * (given.num_generations_eval or given.group_size(objective))
    rewards = RewardSet.of(
        settings, functions, allow_code=allow_code, reward_model=reward_models(settings.device)
    )
    try:
        prompt = _prompt(settings, source, adapter)
        at_once = min(MOST_AT_ONCE, count)
        workload = GenerationWorkload.of(
            source.pretrained, prompts.longest, given.max_completion_length, at_once
        )
        model = load_adapted(source, adapter, settings, observer, workload)
        rewards.load_models()
        engine = Engine(
            model, at_once, prompts.longest + given.max_completion_length, packs_weights=False
        )
        completer = Completer(
            partial(sample_completions, engine), prompt.tokenizer, rewards, given, prompt.stop_ids,
            observer.activity,
        )  # fmt: skip

        def measured(what: str) -> Metrics:
            rollout = completer.evaluate(
                prompts, objective, settings.train.seed, f"evaluating {what}"
            )
            found = rollout.metrics(list(rewards.functions))
            if not math.isfinite(found["reward"]):
                raise RewardError("no reward function gives a reward for the held-out prompts")
            return {name: value for name, value in found.items() if math.isfinite(value)}

        with model.adapter_off():
            base = measured("the base")
        return count, base, None if adapter is None else measured("the adapter")
    finally:
        rewards.close()


def _prompt(settings: Config, source: OpenedModel, adapter: str | None) -> PromptFormat:
    """The format of the run's training data, or without any that of the adapter."""
    if settings.data.train is None and settings.data.sources is None:
        return prompt_for(source, adapter)
    return prompt_of_run(settings, source)
