"""Steps of GRPO and RLOO over completions and rewards that are given."""

from dataclasses import dataclass, replace

import numpy as np

from qlora_wgpu.config import Config, OptimConfig
from qlora_wgpu.grpo.reward_set import RewardSet
from qlora_wgpu.grpo.rollouts import Completion, Prompt, RolloutBatches, evaluate_completions
from qlora_wgpu.model.steps import TrainingOptions
from qlora_wgpu.ops.loss import Objective
from qlora_wgpu.ops.optimizers import STATS_METRICS
from qlora_wgpu.ops.policy import METRICS, means
from qlora_wgpu.training.executor import LocalExecutor
from qlora_wgpu.training.optimizer import Optimizer
from qlora_wgpu.training.policies import RolloutPlan, policy_of

CLIPPED = ("bnpo", "dr_grpo", "dapo", "luspo")
"""Losses that differ from ``grpo`` in the weights of tokens alone, not in what a step computes."""


@dataclass(frozen=True)
class Step:
    loss: float
    gradient: dict
    metrics: dict


def config_of(settings, shape, rate, epsilon):
    """A configuration with some settings of the section grpo."""
    given = {n: list(v) if isinstance(v, tuple) else v for n, v in settings.items()}
    objective = given.pop("objective")
    return Config.model_validate({
        "model": {"path": "unused"}, "data": {"train": "unused"},
        "train": {
            "objective": objective, "max_steps": 1,
            "per_device_train_batch_size": shape["batch"],
            "gradient_accumulation_steps": shape["accumulation"],
        },
        "grpo": {
            "num_generations": shape["group"],
            "max_completion_length": shape["max_completion_length"], **given,
        },
        "optim": {
            "learning_rate": rate, "lr_scheduler_type": "constant", "weight_decay": 0.0,
            "max_grad_norm": 0.0, "adam_epsilon": epsilon,
        },
    })  # fmt: skip


def rollout_of(given, numbers, config):
    """Completions of some prompts, scored."""
    own = [(n, k) for n in numbers for k in range(config.grpo.num_generations)]
    functions = [lambda column=c, **_: [given.rewards[n, k, column] for n, k in own]
                 for c in range(given.rewards.shape[-1])]  # fmt: skip
    for function, name in zip(functions, given.names, strict=False):
        function.__name__ = name
    rewards = RewardSet.of(config, functions, allow_code=False)
    made = [given.completions[n][k] for n, k in own]
    rollout = evaluate_completions(
        [Prompt(given.prompts[n], "") for n, _ in own],
        [Completion(ids, ids[-1] != given.end) for ids in made], [""] * len(own),
        rewards.functions, rewards.weights, rewards.advantages,
        mask_truncated_completions=config.grpo.mask_truncated_completions,
    )  # fmt: skip
    return rollout, list(rewards.functions)


def train(model, adapter, config, given, count, told=lambda advantages: None):
    """So many steps from an adapter, which is also the reference, as a run computes them.

    ``told`` gets the advantages of each generation.
    """
    model.load_adapter(adapter)
    reference = model.read_flat(model.adapter.parameters).copy()
    policy = policy_of(config)
    plan = RolloutPlan.of(np.array([len(p) for p in given.prompts]), config)
    traced = replace(policy, loss_type="grpo") if policy.loss_type in CLIPPED else policy
    model.options = TrainingOptions(objective=Objective(policy=traced), router_aux_loss_coef=0.0)
    optimizer = Optimizer(model, OptimConfig.model_validate(dict(config.optim)), count)
    model.zero_gradient()
    steps, batches = [], None
    for step in range(1, count + 1):
        generation, index = plan.generation_of(step)
        metrics = {}
        if index == 0:
            first = generation * plan.num_prompts
            places = [n % len(given.prompts) for n in range(first, first + plan.num_prompts)]
            rollout, names = rollout_of(given, places, config)
            batches = RolloutBatches(
                LocalExecutor(model), rollout, policy, batch_size=plan.batch_size,
                longest=plan.longest, max_completion_length=plan.max_completion_length,
                reference=reference,
            )  # fmt: skip
            told(batches.rollout.scores.advantages)
            metrics = batches.rollout.metrics(names)
            metrics |= {} if batches.kl is None else {"kl": batches.kl}
        for each in batches.blocks(plan.blocks_of(index)):
            model.accumulate(each.ids, each.targets, each.mask, samples=each.policy)
        stats = model.read_stats()
        sums = dict(zip(METRICS, stats[STATS_METRICS:].tolist(), strict=False))
        gradient = model.adapter.split(model.read_flat(model.adapter.gradient) / stats[1])
        steps.append(Step(float(stats[0] / stats[1]), gradient, metrics | means(sums, policy)))
        optimizer.step(step)
        model.zero_stats()
    return steps, model.adapter_state_dict()
