"""Other trainers' files for preferences become runs that train on them."""

import json
import re

import pytest
from support.dialects import converted, reasons_of

from qlora_wgpu.data.preferences import unpaired_preference
from qlora_wgpu.errors import ConfigError


@pytest.mark.parametrize(
    ("changes", "objective", "loss"),
    [
        ({"beta": 0.2}, "dpo", "sigmoid"),
        ({"loss_type": ["ipo"], "beta": 0.2}, "dpo", "ipo"),
        ({"loss_type": "robust", "label_smoothing": 0.1, "beta": 0.2}, "dpo", "robust"),
        ({"desirable_weight": 2.0, "beta": 0.2}, "kto", "kto"),
        ({"loss_type": "apo_zero_unpaired", "beta": 0.2}, "kto", "apo_zero_unpaired"),
    ],
)
def test_trl(place, changes, objective, loss):
    changes = {"learning_rate": None, "assistant_only_loss": None, **changes}
    config, conversion = converted(place, "trl.yaml", changes)
    assert (config.train.objective, config.train.loss, config.train.beta) == (objective, loss, 0.2)
    assert config.train.label_smoothing == changes.get("label_smoothing", 0)
    assert config.train.desirable_weight == changes.get("desirable_weight", 1)
    assert (config.optim.learning_rate, config.lora.lora_dropout) == (1e-6, 0)
    assert not any("takes the loss on all tokens" in note for note in conversion.notes)
    assert any("ORPO" in note for note in conversion.notes) == (list(changes)[2:] == ["beta"])


def test_what_is_cut_stays_what_is_cut(place):
    for mode in ("keep_start", "keep_end"):
        config, _ = converted(place, "trl.yaml", {"beta": 0.1, "truncation_mode": mode})
        assert config.data.truncation == mode


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("precompute_ref_log_probs", True, "runs once, before the first step"),
        ("metric_for_best_model", "eval_entropy", "the metrics are loss, rewards/accuracies"),
        ("greater_is_better", True, "a lower loss is better"),
        ("train_sampling_strategy", "sequential", "every epoch shuffles all rows"),
    ],
)
def test_keys_are_dropped_with_their_reason(place, key, value, reason):
    _, conversion = converted(place, "trl.yaml", {"beta": 0.1, key: value})
    shown = str(value).lower() if value is True else value
    assert reason in reasons_of(conversion)[f"{key}: {shown}"]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("trl.yaml", {"beta": 0.1}), ("axolotl.yml", {"rl": "dpo"}),
        ("llama_factory.yaml", {"stage": "dpo", "dataset": "pairs"}),
    ],
)  # fmt: skip
def test_what_the_best_adapter_goes_by(place, name, changes):
    described = {"file_name": "pairs.json", "ranking": True}
    (place / "data" / "dataset_info.json").write_text(json.dumps({"pairs": described}))
    changes = {
        "dataset_dir": str(place / "data"), **changes, "load_best_model_at_end": True,
        "metric_for_best_model": "eval_rewards/margins", "greater_is_better": True,
    }  # fmt: skip
    if name != "llama_factory.yaml":
        del changes["dataset_dir"]
    config, conversion = converted(place, name, changes)
    assert config.eval.load_best_model_at_end
    assert config.eval.aim == "highest rewards/margins"
    assert not any("best" in key or "greater" in key for key in reasons_of(conversion))


def test_axolotls_keys_of_trl(place):
    changes = {"rl": "dpo", "rl_beta": 0.3, "trl": {"beta": 0.25}}
    config, conversion = converted(place, "axolotl.yml", changes)
    assert config.train.beta == 0.25
    assert not any(key.startswith("trl:") for key in reasons_of(conversion))


def test_dropout_stays_where_trl_keeps_it(place):
    config, _ = converted(place, "trl.yaml", {"beta": 0.1, "disable_dropout": False})
    assert config.lora.lora_dropout == 0.05


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("label_smoothing", 0.1, "only TRL's losses robust and exo_pair"),
        ("rpo_alpha", 1.0, "sums of losses"),
        ("neftune_noise_alpha", 5, "for preferences"),
    ],
)
def test_terms_of_losses_are_dropped_with_their_reason(place, key, value, reason):
    _, conversion = converted(place, "trl.yaml", {"beta": 0.1, key: value})
    assert reason in reasons_of(conversion)[f"{key}: {value}"]


@pytest.mark.parametrize(("method", "objective", "loss"), [
    ("dpo", "dpo", "sigmoid"), ("ipo", "dpo", "ipo"),
    ("kto", "kto", "kto"), ("orpo", "orpo", "orpo"),
])  # fmt: skip
def test_axolotl(place, method, objective, loss):
    key = "orpo_alpha" if method == "orpo" else "rl_beta"
    config, _ = converted(place, "axolotl.yml", {"rl": method, key: 0.3})
    assert (config.train.objective, config.train.loss, config.train.beta) == (objective, loss, 0.3)


def test_axolotls_rows(place):
    entry = {"path": "o/pairs", "split": "train", "type": "chat_template.default",
             "field_messages": "talk", "field_chosen": "good"}  # fmt: skip
    changes = {"rl": "dpo", "datasets": [entry]}
    config, conversion = converted(place, "axolotl.yml", changes)
    assert config.data.columns == {"messages": "talk", "chosen": "good"}
    assert "datasets[0].type: chat_template.default" not in reasons_of(conversion)
    entry = {"path": "o/pairs", "type": "chatml.intel"}
    config, conversion = converted(place, "axolotl.yml", {"rl": "dpo", "datasets": [entry]})
    assert config.data.columns == {"prompt": "question"}
    assert config.data.chat_template == "chatml"
    assert "as messages" in reasons_of(conversion)["datasets[0].type: chatml.intel"]


@pytest.mark.parametrize(
    ("changes", "objective", "loss"),
    [
        ({"stage": "dpo"}, "dpo", "sigmoid"),
        ({"stage": "dpo", "pref_loss": "hinge"}, "dpo", "hinge"),
        ({"stage": "dpo", "pref_loss": "orpo"}, "orpo", "orpo"),
        ({"stage": "kto", "kto_rejected_weight": 2.0}, "kto", "kto"),
    ],
)
def test_llama_factory(place, changes, objective, loss):
    described = {
        "formatting": "sharegpt", "file_name": "pairs.json",
        "columns": {"messages": "talk", "chosen": "chosen", "rejected": "bad", "kto_tag": "good"},
        "ranking": objective != "kto",
    }  # fmt: skip
    (place / "data" / "dataset_info.json").write_text(json.dumps({"pairs": described}))
    changes = {"dataset": "pairs", "dataset_dir": str(place / "data"), "pref_beta": 0.4, **changes}
    config, _ = converted(place, "llama_factory.yaml", changes)
    assert (config.train.objective, config.train.loss, config.train.beta) == (objective, loss, 0.4)
    assert config.train.undesirable_weight == changes.get("kto_rejected_weight", 1)
    columns = {"completion": "talk", "label": "good"}
    if objective != "kto":
        columns = {"conversations": "talk", "rejected": "bad"}
    assert config.data.columns == columns


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("axolotl.yml", {"rl": "simpo"}, "rl: simpo is not supported (supported: dpo, ipo"),
        ("llama_factory.yaml", {"stage": "ppo"}, "stage: ppo is not supported (supported: pt, sft"),
        ("llama_factory.yaml", {"stage": "dpo", "pref_loss": "simpo"}, "simpo is a loss that is"),
        ("trl.yaml", {"lmbda": 0.5}, "lmbda: 0.5 belongs to a trainer that is not"),
        ("trl.yaml", {"num_generations": 8, "loss_type": "vespo"}, "vespo is a loss that is not"),
        ("trl.yaml", {"loss_type": "discopop"}, "loss_type: discopop is a loss that is not"),
        ("trl.yaml", {"loss_type": ["sigmoid", "sft"]}, "is a sum of losses"),
        ("trl.yaml", {"beta": 0.1, "f_divergence_type": "js_divergence"}, "is a loss that is"),
    ],
)  # fmt: skip
def test_other_losses_are_refused(place, name, changes, reason):
    with pytest.raises(ConfigError, match=re.escape(reason)):
        converted(place, name, changes)


def test_a_whole_conversation_is_judged_by_its_last_answer():
    turns = [{"from": "human", "value": "How?"}, {"from": "gpt", "value": "So."}]
    answer, good = unpaired_preference({"completion": turns, "label": True})
    assert good and [m["content"] for m in answer.row["messages"]] == ["How?", "So."]


@pytest.mark.parametrize(
    "changes", [{"center_rewards_coefficient": 0.01}, {"lora_task_type": "SEQ_CLS"}]
)
def test_trl_reward(place, changes):
    given = {"learning_rate": None, "assistant_only_loss": None, **changes}
    config, _ = converted(place, "trl.yaml", given)
    assert config.train.objective == "reward"
    coefficient = changes.get("center_rewards_coefficient", 0)
    assert config.train.center_rewards_coefficient == coefficient
    assert (config.optim.learning_rate, config.data.truncation) == (1e-4, "drop")


def test_axolotl_reward(place):
    rows = {"path": "pairs.jsonl", "ds_type": "json", "type": "bradley_terry.chat_template"}
    changes = {"reward_model": True, "center_rewards_coefficient": 0.02, "datasets": [rows]}
    config, _ = converted(place, "axolotl.yml", changes)
    assert (config.train.objective, config.train.center_rewards_coefficient) == ("reward", 0.02)
    assert config.data.columns == {"prompt": "input"} and config.data.apply_chat_template
