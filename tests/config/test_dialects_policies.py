"""Other trainers' files for GRPO and RLOO."""

import pytest
from support.dialects import converted, reasons_of

from qlora_wgpu.config.dialects.policies import _SAME
from qlora_wgpu.config.sections.grpo import GRPOConfig

CHANGES = {
    "reward_funcs": ["think_format_reward", "rewards.brevity"], "reward_weights": [1.0, 0.5],
    "num_generations": 4, "generation_batch_size": 32, "max_completion_length": 64, "beta": 0.04,
    "scale_rewards": False, "loss_type": "dr_grpo", "use_vllm": True, "learning_rate": None,
    "top_entropy_quantile": 0.2, "entropy_coef": 0.01,
}  # fmt: skip


@pytest.mark.parametrize("name", ["trl.yaml", "axolotl.yml"])
def test_grpo(place, name):
    (place / "rewards.py").write_text("")
    changes = dict(CHANGES)
    if name == "axolotl.yml":
        changes = {"rl": "grpo", "trl": changes, "learning_rate": None, "micro_batch_size": 8}
    else:
        changes |= {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}
    config, conversion = converted(place, name, changes)
    given = config.grpo
    assert config.train.objective == "grpo" and given.beta == 0.04 and given.loss_type == "dr_grpo"
    assert given.scale_rewards == "none" and given.num_generations == 4
    assert given.reward_funcs[1] == f"{place / 'rewards.py'}:brevity"
    assert list(given.reward_funcs[0]) == ["regex"] and given.reward_weights == [1.0, 0.5]
    reasons = reasons_of(conversion)
    assert "by the run itself" in reasons["use_vllm: true"]
    assert "bonuses" in reasons["entropy_coef: 0.01"] and given.top_entropy_quantile == 0.2


def test_reward_functions_of_trl(place):
    changes = {"reward_funcs": ["accuracy_reward"], "num_generations": 2, "loss_type": None}
    config, _ = converted(place, "trl.yaml", changes)
    assert config.grpo.reward_funcs == [{"math_verify": {"column": "solution"}}]


def test_rloo_and_its_keys(place):
    changes = {"normalize_advantages": True, "num_generations": 2, "loss_type": None}
    config, _ = converted(place, "trl.yaml", changes)
    assert config.train.objective == "rloo" and config.grpo.normalize_advantages


def test_every_converted_key_is_a_setting():
    assert set(_SAME.split()) <= set(GRPOConfig.model_fields)
