"""How prompts are divided into generations, and completions into steps."""

import numpy as np
import pytest

from qlora_wgpu.config import Config
from qlora_wgpu.data import epoch_order
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.training.policies import RolloutPlan, policy_of


def plan(prompts=5, train=(), **grpo):
    config = Config(
        model={"path": "none"},
        train={
            "objective": "grpo", "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2, "seed": 3, **dict(train),
        },
        grpo={"num_generations": 4, "max_completion_length": 8, **grpo},
    )  # fmt: skip
    return RolloutPlan.of(np.arange(1, prompts + 1), config)


def test_generations_take_one_epoch_after_the_other():
    made = plan()
    assert made.num_prompts == 2 and made.steps == 1 and made.longest == 13
    order = [*epoch_order(5, 3, 0), *epoch_order(5, 3, 1)]
    chosen = [n for generation in range(5) for n in made.prompts_of(generation)]
    assert chosen == order
    epochs, rest = made.examples_until(3)
    assert epochs == 1 and rest.tolist() == chosen[5:6]


def test_steps_of_a_generation():
    """Each iteration trains on all micro-batches, two per step."""
    made = plan(steps_per_generation=4, num_iterations=2)
    assert made.num_prompts == 4 and made.steps == 4
    assert [made.generation_of(step) for step in (1, 4, 5)] == [(0, 0), (0, 3), (1, 0)]
    assert [list(made.blocks_of(index)) for index in range(4)] == [[0, 1], [2, 3]] * 2


@pytest.mark.parametrize(("train", "steps"), [({}, 3), ({"num_train_epochs": 2.0}, 5),
                                              ({"max_steps": 7}, 7)])  # fmt: skip
def test_the_number_of_steps(train, steps):
    assert plan(train=train).total_steps == steps


def test_too_many_steps():
    with pytest.raises(ConfigError, match=r"lower it, or set train.max_steps"):
        plan(train={"num_train_epochs": 1e12})


def test_the_objective_of_a_configuration():
    given = {"reward_funcs": ["json"], "beta": 0.0}
    rloo = Config(model={"path": "none"}, train={"objective": "rloo"}, grpo=given)
    policy = policy_of(rloo)
    assert policy.loss_type == "rloo" and policy.has_sequence_ratios and not policy.has_reference
    grpo = Config(
        model={"path": "none"}, train={"objective": "grpo"}, grpo={"top_entropy_quantile": 0.2}
    )
    assert policy_of(grpo).top_entropy_quantile == 0.2 and policy_of(grpo).loss_type == "dapo"
    default = Config(model={"path": "none"}, train={"objective": "rloo"})
    assert policy_of(default).beta == 0.05
    assert policy_of(Config(model={"path": "none"})) is None
