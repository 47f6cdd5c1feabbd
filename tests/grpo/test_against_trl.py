"""Steps of GRPO and its kin against what TRL's trainer computes of the same completions."""

import json
from pathlib import Path

import numpy as np
import pytest
from references.policy_cases import (
    CASES,
    MAX_COMPLETION_LENGTH,
    RATE,
    STEPS,
    advantages,
    completions,
)
from references.projections import distance, projections
from support.recorded_models import recorded_base, start

from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig
from qlora_wgpu.config import OptimConfig
from qlora_wgpu.grpo.advantages import Scores
from qlora_wgpu.grpo.rollouts import Completion, Prompt, Rollout, RolloutBatches
from qlora_wgpu.model.steps import TrainingOptions
from qlora_wgpu.ops.loss import Objective
from qlora_wgpu.ops.optimizers import STATS_METRICS
from qlora_wgpu.ops.policy import METRICS, Policy, means
from qlora_wgpu.training.executor import LocalExecutor
from qlora_wgpu.training.optimizer import Optimizer

FOLDER = Path(__file__).parents[1] / "references"
RECORDED = np.load(FOLDER / "policy.npz")


def rollout():
    prompts, answers = completions()
    rewards = np.zeros((len(prompts), 1))
    scores = Scores(rewards, np.ones(1), advantages(), np.zeros(len(prompts), np.bool_))
    return Rollout(
        [Prompt(ids, "") for ids in prompts], [Completion(ids, False) for ids in answers],
        [""] * len(prompts), scores, np.ones(len(prompts), np.bool_),
    )  # fmt: skip


@pytest.mark.quick(case=["dapo-warm"])
@pytest.mark.parametrize("case", CASES)
def test_three_steps(device, tmp_path, case):
    base = np.load(FOLDER / "llama.npz")
    modules = {n.split(".")[-3] for n in base.files if n.startswith("grad:")}
    lora = LoraConfig(r=5, lora_alpha=10, lora_dropout=0.0, target_modules=sorted(modules))
    folder, recorded = recorded_base(FOLDER / "llama.npz", tmp_path)
    model = QLoRAModel.from_pretrained(folder, lora, QuantConfig(scheme="none"), "float32", device)
    model.load_adapter(start(recorded))
    policy = Policy(**{"loss_type": "dapo", **CASES[case]})
    model.options = TrainingOptions(objective=Objective(policy=policy), router_aux_loss_coef=0.0)
    made = RolloutBatches(
        LocalExecutor(model), rollout(), policy, batch_size=4, longest=64,
        max_completion_length=MAX_COMPLETION_LENGTH, reference=model.neutral,
    )  # fmt: skip
    optim = OptimConfig(
        learning_rate=RATE, lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=0.0
    )
    optimizer, names = Optimizer(model, optim, STEPS), RECORDED["names"].tolist()
    for step in range(STEPS):
        for batch in made:
            model.accumulate(batch.ids, batch.targets, batch.mask, samples=batch.policy)
        stats = model.read_stats()
        loss = float(stats[0] / stats[1])
        assert abs(loss - RECORDED[f"{case}:losses"][step]) <= 1e-5 * max(abs(loss), 1)
        gradient = model.adapter.split(model.read_flat(model.adapter.gradient) / stats[1])
        for name, (norm, *theirs) in zip(names, RECORDED[f"{case}:gradients"][step], strict=True):
            apart = distance(projections(name, gradient[name]), np.array(theirs))
            # Steps begin by the sign of each gradient, so rounding grows with them.
            assert apart <= (2e-5, 2e-4, 1e-3)[step] * norm + 1e-9, (name, step, apart / norm)
        optimizer.step(step + 1)
        if step < STEPS - 1:
            model.zero_stats()
    sums = dict(zip(METRICS, stats[STATS_METRICS:].tolist(), strict=False))
    expected = json.loads(str(RECORDED[f"{case}:metrics"]))
    shown = means(sums, policy)
    assert shown == pytest.approx(expected, rel=1e-4, abs=1e-6)
    state = model.adapter_state_dict()
    for name, theirs in zip(names, RECORDED[f"{case}:adapter"], strict=True):
        norm = np.linalg.norm(state[name])
        assert distance(projections(name, state[name]), theirs) <= 1e-4 * norm
