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
@pytest.mark.cover(dtype=["bfloat16"], sequence_level=[True])
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


# ---- micro-batches -------------------------------------------------------------------------------


class Executor:
    """Log probabilities that follow from ids: of the reference, twice as much."""

    def __init__(self):
        self.calls = []

    def token_logps(self, batches, adapter=None):
        self.calls.append(adapter)
        return [
            (1 if adapter is None else 2) * batch.ids.astype(np.float32) * (batch.targets >= 0)
            for batch in batches
        ]


def given(*lengths, kept=None):
    """A rollout of completions of these lengths, two of a prompt, with rewards 0, 1, 2, …"""
    prompts = [PROMPTS[number // 2] for number in range(len(lengths))]
    completions = [Completion([20 + n] * length, False) for n, length in enumerate(lengths)]
    rollout = evaluate_completions(
        prompts, completions, [""] * len(lengths),
        {"count": lambda completions, **_: list(range(len(completions)))}, [1.0],
        AdvantageConfig(2, leave_one_out=kept is None),
    )  # fmt: skip
    return rollout if kept is None else dataclasses.replace(rollout, has_loss=np.array(kept))


def blocks_of(rollout, policy, executor=None, **more):
    return RolloutBatches(
        executor or Executor(), rollout, policy, batch_size=2, longest=16, max_completion_length=8,
        **more,
    )  # fmt: skip


def test_completions_are_rows_of_micro_batches():
    rollout = given(3, 1, 2, 2, kept=[True, True, True, False])
    first, second = blocks_of(rollout, Policy("dapo", is_on_policy=True))
    assert first.tokens == 3 + 3 + 3 + 1 and second.tokens == 2 * (2 + 2)
    assert first.ids[0, :6].tolist() == [5, 9, 11, 20, 20, 20]
    ignored = first.targets[0][first.targets[0] < 0]
    assert first.targets[0, :7].tolist() == [*ignored[:2], 20, 20, 20, *ignored[2:4]]
    assert first.targets[1, 2] == 21 and (second.targets[1] < 0).all()
    assert (first.mask > 0).sum(axis=1).tolist() == [6, 4]
    assert first.policy.advantages.dtype == np.float32
    assert first.policy.advantages.tolist() == rollout.scores.advantages[:2].astype("f4").tolist()
    assert second.policy.advantages.tolist() == rollout.scores.advantages[2:].astype("f4").tolist()
    # Of 6 tokens with a loss, a half counts for each micro-batch, shared by its completions.
    assert second.policy.shares.tolist() == [1.5, 1.5]
    assert not np.any(second.policy.old_logps) and not np.any(second.policy.reference_logps)
    assert first.policy.has_loss.tolist() == [True, True]
    assert second.policy.has_loss.tolist() == [True, False]


def test_no_tokens_at_all_are_no_division_by_zero():
    rollout = given(2, 2, kept=[False, False])
    (only,) = blocks_of(rollout, Policy("dapo", is_on_policy=True))
    assert only.policy.shares.tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("policy", "calls"),
    [
        (Policy("grpo", is_on_policy=True), []),
        (Policy("grpo"), [None]),
        (Policy("grpo", beta=0.1, is_on_policy=True), ["reference"]),
        (Policy("grpo", beta=0.1), [None, "reference"]),
        (Policy("rloo", beta=0.1, is_on_policy=True), [None, "reference"]),
    ],
)
def test_log_probabilities_are_computed_where_an_objective_has_them(policy, calls):
    executor = Executor()
    made = blocks_of(given(1, 2, 1, 2), policy, executor, reference="reference")
    assert executor.calls == calls
    for batch, old, other in zip(made, made.logps.old, made.logps.reference, strict=True):
        seen = batch.ids * (batch.targets >= 0)
        assert np.array_equal(old, seen * (None in calls))
        assert np.array_equal(other, 2 * seen * ("reference" in calls))


def test_rloo_s_divergence_is_per_token_and_lowers_rewards():
    rollout = given(3, 1, 2, 2)
    made = blocks_of(rollout, Policy("rloo", beta=0.5), reference="reference")
    # Each completion's targets are those of its prompt's last token and of all of its own but one.
    sums = np.array([11 + 2 * 20, 11, 8 + 22, 8 + 23])
    assert made.kl == -sums.sum() / 8
    totals = np.arange(4) + 0.5 * sums
    expected = totals - totals.reshape(2, 2)[:, ::-1].reshape(-1)
    np.testing.assert_allclose(made.rollout.scores.advantages, expected)
    for policy in (Policy("rloo"), Policy("grpo", beta=0.5)):
        assert blocks_of(rollout, policy, reference="reference").kl is None


def test_known_log_probabilities_are_taken_as_they_are():
    executor, rollout = Executor(), given(3, 1, 2, 2)
    policy = Policy("rloo", beta=0.5)
    made = blocks_of(rollout, policy, reference="reference")
    flat = [np.concatenate([each.reshape(-1) for each in own])
            for own in (made.logps.old, made.logps.reference)]  # fmt: skip
    again = blocks_of(made.rollout, policy, executor, known=tuple(flat))
    assert executor.calls == [] and again.rollout is made.rollout
    assert len(again.logps.old) == len(again) == 2
    for own, other in zip(
        (*made.logps.old, *made.logps.reference),
        (*again.logps.old, *again.logps.reference),
        strict=True,
    ):
        assert np.array_equal(own, other)
