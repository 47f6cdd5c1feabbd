"""Rollouts on a tiny model: what is sampled, scored and learned from."""

import dataclasses

import numpy as np
import pytest
from e2e.tiny import VOCAB, write_model

from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig
from qlora_wgpu.config import OptimConfig
from qlora_wgpu.generation.engine import Engine
from qlora_wgpu.generation.sampling import Sampling
from qlora_wgpu.grpo.advantages import AdvantageConfig, score
from qlora_wgpu.grpo.rollouts import (
    Completion,
    Prompt,
    RolloutBatches,
    evaluate_completions,
    sample_completions,
    seed_of,
)
from qlora_wgpu.model.steps import TrainingOptions
from qlora_wgpu.ops.loss import Objective
from qlora_wgpu.ops.optimizers import STATS_METRICS
from qlora_wgpu.ops.policy import METRICS, Policy, means
from qlora_wgpu.training.executor import LocalExecutor
from qlora_wgpu.training.optimizer import Optimizer

LENGTH, GROUP = 12, 4
PROMPTS = [Prompt([5, 9, 11], "abc", {"wanted": 20}), Prompt([7, 8], "de", {"wanted": 31})]


def share_of_wanted(completion_ids, wanted, **_):
    """How much of a completion is one token."""
    return [ids.count(token) / LENGTH for ids, token in zip(completion_ids, wanted, strict=True)]


def opened(folder, device, policy, dtype="float32"):
    write_model(folder)
    lora = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0)
    model = QLoRAModel.from_pretrained(folder, lora, QuantConfig(), dtype, device)
    model.options = TrainingOptions(objective=Objective(policy=policy), router_aux_loss_coef=0.0)
    return model


def sampled(model, generation, engine=None, temperature=1.0):
    engine = engine or Engine(model, 8, 32)
    prompts = [prompt for prompt in PROMPTS for _ in range(GROUP)]
    seeds = [seed_of(3, generation, n) for n in range(len(prompts))]
    completions = sample_completions(
        engine, prompts, Sampling(temperature=temperature), seeds, max_completion_length=LENGTH,
        stop_ids={1},
    )  # fmt: skip
    texts = ["".join(chr(97 + i % 26) for i in c.ids) for c in completions]
    return evaluate_completions(
        prompts, completions, texts, {"share": share_of_wanted}, [1.0], AdvantageConfig(GROUP)
    )


def batches(model, rollout, policy, reference=None):
    return RolloutBatches(
        LocalExecutor(model), rollout, policy, batch_size=4, longest=32,
        max_completion_length=LENGTH, reference=model.neutral if reference is None else reference,
    )  # fmt: skip


@pytest.mark.slow
def test_a_completion_depends_on_its_own_seed_alone(device, tmp_path):
    model = opened(tmp_path, device, Policy())
    whole = sampled(model, 0)
    few = sampled(model, 0, Engine(model, 3, 32))
    assert [c.ids for c in whole.completions] == [c.ids for c in few.completions]
    assert [c.ids for c in sampled(model, 1).completions] != [c.ids for c in whole.completions]
    for completion in whole.completions:
        assert 1 <= len(completion.ids) <= LENGTH
        assert completion.is_truncated == (completion.ids[-1] != 1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sequence_level", [False, True])
def test_the_first_ratio_is_one_to_the_bit(device, tmp_path, dtype, sequence_level):
    """No token is clipped, however near the bounds are."""
    policy = Policy("grpo", 0.04, 0.0, 0.0, sequence_level=sequence_level, temperature=0.7)
    model = opened(tmp_path, device, policy, dtype)
    rollout = sampled(model, 0, temperature=0.7)
    for batch in batches(model, rollout, policy):
        model.accumulate(batch.ids, batch.targets, batch.mask, samples=batch.policy)
    stats = model.read_stats()
    sums = dict(zip(METRICS, stats[STATS_METRICS:].tolist(), strict=False))
    assert sums["clipped"] == 0 and sums["batches"] == sums["clipping"] == len(rollout) / 4
    assert sums["kl"] == 0.0  # the adapter has not moved
    # The loss of unmoved ratios is minus the mean advantage, which is zero within each group.
    assert abs(stats[0]) <= 1e-5 and stats[1] == len(rollout)
    shown = means(sums, policy)
    assert shown["clip_ratio/low_min"] == shown["clip_ratio/high_max"] == 0.0


def test_truncated_completions_may_be_left_out(device, tmp_path):
    policy = Policy("dapo")
    model = opened(tmp_path, device, policy)
    completions = [Completion([5, 6, 1], False), Completion([7] * LENGTH, True)] * 4
    prompts = [prompt for prompt in PROMPTS for _ in range(GROUP)]
    rollout = evaluate_completions(
        prompts, completions, [""] * 8, {"share": lambda **b: [1.0, 0.0] * 4}, [1.0],
        AdvantageConfig(GROUP), mask_truncated_completions=True,
    )  # fmt: skip
    assert rollout.lengths.tolist() == [3, 0] * 4
    for batch in batches(model, rollout, policy):
        model.accumulate(batch.ids, batch.targets, batch.mask, samples=batch.policy)
    stats = model.read_stats()
    assert stats[1] == pytest.approx(12)


@pytest.mark.slow
@pytest.mark.cover(loss_type=["dapo"])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "cispo", "sapo"])
def test_the_mean_reward_rises(device, tmp_path, loss_type):
    policy = Policy(loss_type, epsilon_high=5.0 if loss_type == "cispo" else None)
    model = opened(tmp_path, device, policy)
    optimizer = Optimizer(model, OptimConfig(learning_rate=3e-2, lr_scheduler_type="constant"), 30)
    engine, rewards = Engine(model, 8, 32), []
    for step in range(1, 31):
        rollout = sampled(model, step, engine)
        rewards.append(rollout.metrics(["share"])["reward"])
        for batch in batches(model, rollout, policy):
            model.accumulate(batch.ids, batch.targets, batch.mask, samples=batch.policy)
        optimizer.step(step)
        model.zero_stats()
    first, last = np.mean(rewards[:5]), np.mean(rewards[-5:])
    assert first < 0.05 and last > 0.2, rewards  # random tokens have a share of 1 / 83


@pytest.mark.slow
def test_a_constant_reward_changes_nothing(device, tmp_path):
    policy = Policy("grpo")
    model = opened(tmp_path, device, policy)
    before = model.adapter_state_dict()
    optim = OptimConfig(learning_rate=1e-2, lr_scheduler_type="constant", weight_decay=0.0)
    optimizer = Optimizer(model, optim, 2)
    for step in (1, 2):
        rollout = sampled(model, step)
        flat = dataclasses.replace(
            rollout, scores=dataclasses.replace(rollout.scores, advantages=np.zeros(8))
        )
        for batch in batches(model, flat, policy):
            model.accumulate(batch.ids, batch.targets, batch.mask, samples=batch.policy)
        optimizer.step(step)
        model.zero_stats()
    after = model.adapter_state_dict()
    assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_rloo_subtracts_the_divergence_from_the_rewards(device, tmp_path):
    policy = Policy("rloo", 0.5)
    model = opened(tmp_path, device, policy)
    neutral = model.read_flat(model.adapter.parameters).copy()
    moved = neutral + np.random.default_rng(0).normal(0, 0.1, neutral.shape).astype(np.float32)
    model.write_parameters(moved)
    config = AdvantageConfig(GROUP, leave_one_out=True)
    rollout = dataclasses.replace(sampled(model, 0), config=config)
    made = batches(model, rollout, policy)
    sums = []
    for old, other in zip(made.logps.old, made.logps.reference, strict=True):
        sums += (old - other).sum(axis=1).tolist()
    expected = score(
        rollout.scores.rewards, rollout.scores.weights, config, 0.5 * np.array(sums)
    ).advantages
    np.testing.assert_allclose(made.rollout.scores.advantages, expected, atol=1e-5)
    assert made.kl == pytest.approx(sum(sums) / rollout.lengths.sum(), rel=1e-4)
    assert abs(made.kl) > 1e-3
    # An adapter that a run continues is part of its reference.
    same = batches(model, rollout, policy, moved)
    assert same.kl == 0.0 and np.array_equal(model.read_flat(model.adapter.parameters), moved)


def test_prompts_stay_within_the_vocabulary():
    assert all(token < VOCAB for prompt in PROMPTS for token in prompt.ids)
