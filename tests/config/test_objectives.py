"""Settings of objectives: TRL's names and defaults, and what does not go together."""

import pytest

from qlora_wgpu.config import Config
from qlora_wgpu.config.sections.train import LOSSES, TrainConfig
from qlora_wgpu.config.values import eval_metrics
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.ops.preference import METRICS, PAIR_LOSSES, SINGLE_LOSSES, means
from qlora_wgpu.ops.score import means as score_means
from qlora_wgpu.training.preferences import preference_of, scoring_of, training_options


def settings(train, **sections):
    return Config.model_validate({"model": {"path": "m"}, "train": train, **sections})


def test_losses_are_those_that_kernels_have():
    assert LOSSES["dpo"] == PAIR_LOSSES and LOSSES["kto"] == SINGLE_LOSSES


@pytest.mark.parametrize(
    ("objective", "loss"), [("sft", "nll"), ("dpo", "sigmoid"), ("orpo", "orpo"), ("kto", "kto")]
)
def test_defaults_are_trls(objective, loss):
    train = TrainConfig(objective=objective)
    assert (train.loss, train.beta, train.label_smoothing) == (loss, 0.1, 0.0)
    assert (train.desirable_weight, train.undesirable_weight) == (1.0, 1.0)
    assert (preference_of(train) is None) == (objective == "sft")


def test_a_list_of_one_loss_is_that_loss():
    assert TrainConfig(objective="dpo", loss_type=["ipo"]).loss == "ipo"


def test_dft_weights_by_confidence():
    assert training_options(TrainConfig(loss_type="dft")).objective.confidence
    assert not training_options(TrainConfig()).objective.confidence


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"loss_type": "sigmoid"}, "train.loss_type.* nll or dft with train.objective: sft"),
        ({"objective": "dpo", "loss_type": "kto"}, "train.loss_type.*sigmoid or hinge"),
        ({"objective": "dpo", "loss_type": ["ipo", "sigmoid"]}, "train.loss_type"),
        ({"objective": "orpo", "loss_type": "sigmoid"}, "must be null with train.objective: orpo"),
        ({"objective": "rlhf"}, "train.objective"),
        ({"objective": "dpo", "beta": 0.0}, "train.beta"),
        (
            {"objective": "dpo", "label_smoothing": 0.1},
            "train.label_smoothing.*robust or exo_pair",
        ),
        ({"label_smoothing": 0.1}, "train.label_smoothing_factor"),
        ({"objective": "dpo", "loss_type": "exo_pair"}, "train.label_smoothing.*above 0"),
        ({"objective": "dpo", "loss_type": "robust", "label_smoothing": 0.5}, "below 0.5"),
        ({"objective": "dpo", "desirable_weight": 2.0}, "train.desirable_weight.*kto"),
        (
            {"objective": "kto", "desirable_weight": 0, "undesirable_weight": 0},
            "train.undesirable_weight.*above 0 with train.desirable_weight: 0",
        ),
        ({"objective": "dpo", "label_smoothing_factor": 0.1}, "train.label_smoothing_factor"),
        ({"loss_type": "dft", "z_loss_weight": 0.1}, "train.z_loss_weight.*train.loss_type: dft"),
        ({"objective": "kto", "neftune_noise_alpha": 5.0}, "train.neftune_noise_alpha"),
    ],
)
def test_what_does_not_go_together(train, message):
    with pytest.raises(ConfigError, match=message):
        settings(train)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"train_on": "all"}}, "data.format and data.train_on at auto"),
        ({"data": {"format": "text"}}, "data.format and data.train_on at auto"),
        (
            {"data": {"sources": [{"path": "a"}, {"path": "b", "format": "text"}]}},
            "data.format and data.train_on at auto",
        ),
    ],
)
def test_what_answers_do_not_go_with(sections, message):
    with pytest.raises(ConfigError, match=message):
        settings({"objective": "dpo"}, **sections)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"train": {"labels": ["a", "b"]}}, "train.labels.*requires train.objective: classif"),
        ({"train": {"center_rewards_coefficient": 0.1, "objective": "dpo"}}, "objective: reward"),
        (
            {"train": {"objective": "classification", "labels": [0, 0]}},
            "train.labels.*has '0' twice",
        ),
        (
            {
                "train": {
                    "objective": "classification",
                    "labels": ["a", "b"],
                    "class_weights": [1.0, 2.0, 3.0],
                }
            },
            "train.class_weights.*must have 2 weights, one per label, got 3",
        ),
        (
            {
                "train": {
                    "objective": "classification",
                    "problem_type": "regression",
                    "class_weights": [1.0, 2.0],
                }
            },
            "train.class_weights.*requires train.problem_type: single_label",
        ),
        ({"train": {"objective": "reward"}, "data": {"packing": True}}, "data.packing"),
        (
            {
                "train": {"objective": "classification", "problem_type": "regression"},
                "eval": {"metric_for_best_model": "accuracy"},
            },
            "classification are loss, mae",
        ),
    ],
)
def test_what_scores_do_not_go_with(sections, message):
    with pytest.raises(ConfigError, match=message):
        settings(**sections)


@pytest.mark.parametrize("objective", list(LOSSES))
def test_evaluations_give_what_can_say_which_is_best(objective):
    for loss in (None, *LOSSES[objective]):
        if loss == "exo_pair":
            continue
        train = TrainConfig(objective=objective, loss_type=loss)
        known = {"reward"} if objective in ("grpo", "rloo") else {"loss"}
        if known == {"reward"}:
            pass
        elif (scoring := scoring_of(train)) is not None:
            known |= score_means([1.0] * 7, scoring).keys()
            known |= {"macro_f1"} if objective == "classification" else set()
        elif (preference := preference_of(train)) is None:
            known.add("mean_token_accuracy")
        else:
            known |= means(dict.fromkeys(METRICS, 1.0), preference).keys()
        assert set(eval_metrics(objective, loss)) == known
        for name in known:
            whole = settings({"objective": objective, "loss_type": loss},
                             eval={"metric_for_best_model": f"eval_{name}"})  # fmt: skip
            assert whole.eval.metric_for_best_model == name
            assert whole.eval.more_is_better != name.endswith("loss")
            assert Config.model_validate(whole.model_dump()) == whole


@pytest.mark.parametrize(
    ("train", "given", "message"),
    [
        ({}, {"metric_for_best_model": "rewards/margins"},
         "has metric_for_best_model: rewards/margins, but .*: sft are loss, mean_token_a"),
        ({"objective": "kto"}, {"metric_for_best_model": "rewards/accuracies"}, "kto are .* kl"),
        ({"objective": "kto", "loss_type": "apo_zero_unpaired"}, {"metric_for_best_model": "kl"},
         "has metric_for_best_model: kl"),
        ({}, {"greater_is_better": True}, "eval.greater_is_better .*where lower is better"),
    ],
)  # fmt: skip
def test_figures_that_no_evaluation_gives(train, given, message):
    with pytest.raises(ConfigError, match=message):
        settings(train, eval=given)


def test_a_pair_has_two_rows_unless_they_are_packed():
    for objective, packing, rows in (
        ("sft", False, 3), ("dpo", False, 6), ("orpo", True, 3), ("kto", False, 3),
    ):  # fmt: skip
        train = {"objective": objective, "per_device_train_batch_size": 3}
        assert settings(train, data={"packing": packing}).rows_at_once == rows
