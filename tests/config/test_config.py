"""The settings as Python objects: defaults, types, ranges, and errors in plain words."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from qlora_wgpu.config import (
    ClusterConfig,
    Config,
    DataConfig,
    DeviceConfig,
    EvalConfig,
    LoraConfig,
    OptimConfig,
    OutputConfig,
    QuantConfig,
    TrainConfig,
    load_config,
)
from qlora_wgpu.config.section import shown
from qlora_wgpu.errors import ConfigError

DEFAULTS = {
    "model": {"path": "base", "cache": True, "add_tokens": [], "add_special_tokens": []},
    "quant": {"scheme": "nf4", "blocksize": 64, "double_quant": True},
    "lora": {
        "r": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.0,
        "target_modules": "all-linear",
        "use_rslora": False,
        "use_dora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "layers_to_transform": None,
        "init_lora_weights": "default",
        "trainable_token_indices": None,
        "modules_to_save": None,
        "ensure_weight_tying": False,
        "init_from": None,
    },
    "data": {
        "train": None,
        "sources": None,
        "stopping_strategy": "first_exhausted",
        "eval": None,
        "eval_split": None,
        "max_seq_length": 1024,
        "format": "auto",
        "columns": {},
        "train_on": "auto",
        "truncation": "keep_start",
        "packing": False,
        "group_by_length": True,
        "cache": True,
        "apply_chat_template": False,
        "image_cache": "disk",
        "chat_template": None,
    },
    "train": {
        "num_train_epochs": 1.0,
        "max_steps": -1,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 16,
        "gradient_checkpointing": True,
        "compute_dtype": "bfloat16",
        "gradient_dtype": "float32",
        "label_smoothing_factor": 0.0,
        "z_loss_weight": 0.0,
        "router_aux_loss_coef": None,
        "neftune_noise_alpha": 0.0,
        "objective": "sft",
        "loss_type": None,
        "beta": 0.1,
        "label_smoothing": 0.0,
        "desirable_weight": 1.0,
        "undesirable_weight": 1.0,
        "center_rewards_coefficient": 0.0,
        "problem_type": "single_label_classification",
        "labels": None,
        "class_weights": None,
        "seed": 0,
    },
    "grpo": {
        "reward_funcs": [],
        "reward_weights": None,
        "reward_timeout": 60.0,
        "num_generations": None,
        "num_generations_eval": None,
        "max_completion_length": 512,
        "steps_per_generation": None,
        "num_iterations": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "repetition_penalty": 1.0,
        "beta": None,
        "epsilon": 0.2,
        "epsilon_high": None,
        "delta": None,
        "loss_type": "dapo",
        "importance_sampling_level": "token",
        "scale_rewards": "group",
        "multi_objective_aggregation": "sum_then_normalize",
        "mask_truncated_completions": False,
        "use_bias_correction_kl": True,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "top_entropy_quantile": 1.0,
        "normalize_advantages": False,
        "reward_clip_range": None,
        "log_completions": False,
    },
    "optim": {
        "name": "adamw",
        "learning_rate": 2e-4,
        "lr_scheduler_type": "cosine",
        "lr_scheduler_kwargs": {},
        "warmup_ratio": 0.03,
        "warmup_steps": 0,
        "loraplus_lr_ratio": 1.0,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
    },
    "eval": {
        "eval_steps": 50,
        "load_best_model_at_end": False,
        "metric_for_best_model": "loss",
        "greater_is_better": None,
        "early_stopping_patience": None,
        "early_stopping_threshold": 0.0,
        "sample_prompts": [],
        "sample_steps": 0,
        "sample_max_new_tokens": None,
    },
    "log": {"logging_steps": 1, "report_to": []},
    "output": {"dir": "runs/first", "save_steps": 50, "save_total_limit": 2},
    "device": {
        "gpu": "auto",
        "backend": "auto",
        "keep_dequantized": "auto",
        "tune": "auto",
        "dispatches_per_submit": 100,
        "submit_milliseconds": 100.0,
        "timeout": None,
        "memory": "auto",
    },
    "cluster": {
        "scheduler": None,
        "workers": "auto",
        "division": "measured",
        "patience": 600.0,
        "certificates": None,
        "allow_plain_tcp": False,
    },
}


def message(make) -> str:
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return str(caught.value)


def test_defaults() -> None:
    assert Config(model={"path": "base"}).model_dump() == DEFAULTS


def test_every_field_is_described_in_one_sentence() -> None:
    for name, field in Config.model_fields.items():
        assert field.annotation.__doc__, name
        for leaf, leaf_field in field.annotation.model_fields.items():
            assert leaf_field.description, f"{name}.{leaf}"
            assert leaf_field.description.endswith("."), f"{name}.{leaf}"
            assert "\n\n" not in leaf_field.description


def test_json_schema_covers_every_key() -> None:
    definitions = Config.model_json_schema()["$defs"]
    for name, field in Config.model_fields.items():
        properties = definitions[field.annotation.__name__]["properties"]
        assert set(properties) == set(DEFAULTS[name])


@pytest.mark.parametrize(
    ("rslora", "expected"), [(False, 16 / 8), (True, 16 / math.sqrt(8))], ids=["lora", "rslora"]
)
def test_scaling(rslora: bool, expected: float) -> None:
    assert LoraConfig(r=8, lora_alpha=16, use_rslora=rslora).scaling == expected


@pytest.mark.parametrize("names", [["q_proj", "v_proj"], ("q_proj", "v_proj")])
def test_target_modules_become_a_list(names) -> None:
    assert LoraConfig(target_modules=names).target_modules == ["q_proj", "v_proj"]


def test_a_set_of_target_modules_has_one_order() -> None:
    assert LoraConfig(target_modules={"v_proj", "q_proj"}).target_modules == ["q_proj", "v_proj"]


@pytest.mark.parametrize(
    "value", ["q_proj", [], [3], [""], ["q_proj", "q_proj"], None, 3, {"q_proj": 1}, True]
)
def test_wrong_target_modules(value) -> None:
    assert "target_modules in LoraConfig must" in message(lambda: LoraConfig(target_modules=value))


@pytest.mark.parametrize(
    ("section", "values"),
    [
        (LoraConfig, {"r": 0}),
        (LoraConfig, {"r": 8.0}),
        (LoraConfig, {"r": True}),
        (LoraConfig, {"r": "8"}),
        (LoraConfig, {"r": None}),
        (LoraConfig, {"lora_alpha": 0}),
        (LoraConfig, {"lora_alpha": 1e300}),
        (LoraConfig, {"lora_alpha": 10**400}),
        (LoraConfig, {"lora_dropout": 1.0}),
        (LoraConfig, {"lora_dropout": -0.1}),
        (LoraConfig, {"lora_dropout": math.nan}),
        (LoraConfig, {"use_rslora": 1}),
        (QuantConfig, {"scheme": "fp4"}),
        (QuantConfig, {"scheme": None}),
        (QuantConfig, {"blocksize": 65}),
        (QuantConfig, {"blocksize": 64.0}),
        (QuantConfig, {"blocksize": True}),
        (QuantConfig, {"double_quant": "yes"}),
        (DataConfig, {"max_seq_length": 1}),
        (DataConfig, {"train": ""}),
        (DataConfig, {"train": 3}),
        (TrainConfig, {"num_train_epochs": 0}),
        (TrainConfig, {"num_train_epochs": math.inf}),
        (TrainConfig, {"max_steps": 0}),
        (TrainConfig, {"max_steps": -2}),
        (TrainConfig, {"per_device_train_batch_size": 0}),
        (TrainConfig, {"gradient_accumulation_steps": 0}),
        (TrainConfig, {"compute_dtype": "float16"}),
        (TrainConfig, {"seed": -1}),
        (TrainConfig, {"label_smoothing_factor": 1.0}),
        (TrainConfig, {"z_loss_weight": -1e-4}),
        (TrainConfig, {"seed": 2**32}),
        (OptimConfig, {"name": "muon"}),
        (OptimConfig, {"learning_rate": 0.0}),
        (OptimConfig, {"learning_rate": math.nan}),
        (OptimConfig, {"learning_rate": True}),
        (OptimConfig, {"lr_scheduler_type": "greedy"}),
        (OptimConfig, {"warmup_ratio": 1.5}),
        (OptimConfig, {"warmup_steps": -1}),
        (OptimConfig, {"weight_decay": -0.1}),
        (OptimConfig, {"max_grad_norm": -1.0}),
        (OptimConfig, {"adam_beta1": 1.0}),
        (OptimConfig, {"adam_beta2": -0.1}),
        (OptimConfig, {"adam_epsilon": 0.0}),
        (EvalConfig, {"eval_steps": -1}),
        (EvalConfig, {"eval_steps": 1.0}),
        (EvalConfig, {"eval_steps": 0.0}),
        (EvalConfig, {"eval_steps": 1.5}),
        (EvalConfig, {"eval_steps": math.nan}),
        (EvalConfig, {"eval_steps": True}),
        (EvalConfig, {"sample_steps": -1}),
        (EvalConfig, {"sample_steps": "often"}),
        (OutputConfig, {"dir": ""}),
        (OutputConfig, {"save_steps": 0}),
        (OutputConfig, {"save_total_limit": 0}),
        (DeviceConfig, {"gpu": -1}),
        (DeviceConfig, {"gpu": True}),
        (ClusterConfig, {"scheduler": "192.168.1.5:8786"}),
        (ClusterConfig, {"scheduler": "tls://host"}),
        (ClusterConfig, {"scheduler": "http://host:8786"}),
        (ClusterConfig, {"scheduler": 8786}),
        (ClusterConfig, {"workers": 0}),
        (ClusterConfig, {"workers": True}),
        (ClusterConfig, {"workers": "all"}),
        (ClusterConfig, {"patience": 0.0}),
        (ClusterConfig, {"certificates": ""}),
    ],
)
def test_wrong_values_name_key_and_class(section, values) -> None:
    (key,) = values
    text = message(lambda: section(**values))
    assert text.startswith(f"{key} in {section.__name__} must ")
    assert ", got " in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("section", "values"),
    [
        (LoraConfig, {"lora_dropout": 0}),
        (LoraConfig, {"r": 1}),
        (QuantConfig, {"scheme": "none", "blocksize": 4096}),
        (TrainConfig, {"num_train_epochs": 3}),
        (TrainConfig, {"num_train_epochs": 0.5}),
        (TrainConfig, {"max_steps": 1}),
        (TrainConfig, {"seed": 2**32 - 1}),
        (OptimConfig, {"learning_rate": 1}),
        (OptimConfig, {"max_grad_norm": 0}),
        (EvalConfig, {"eval_steps": 0}),
        (EvalConfig, {"eval_steps": 1}),
        (EvalConfig, {"eval_steps": 0.25}),
        (EvalConfig, {"sample_steps": 0.25}),
        (EvalConfig, {"sample_steps": "eval"}),
        (OutputConfig, {"save_total_limit": None}),
        (ClusterConfig, {"scheduler": "local", "workers": 4}),
        (ClusterConfig, {"scheduler": "tls://[fe80::1]:8786"}),
        (ClusterConfig, {"scheduler": "tcp://127.0.0.1:8786", "patience": 5}),
    ],
)
def test_values_at_the_edges(section, values) -> None:
    built = section(**values)
    for key, value in values.items():
        assert getattr(built, key) == value


def test_a_gpu_s_index_may_be_a_number() -> None:
    assert DeviceConfig(gpu=1).gpu == "1"


def test_numpy_scalars_and_paths_are_taken_for_what_they_hold() -> None:
    assert LoraConfig(r=np.int64(4), lora_dropout=np.float64(0.5)).r == 4
    assert OutputConfig(dir=Path("a") / "b").dir == str(Path("a") / "b")


def test_several_problems_are_listed_together() -> None:
    lines = message(lambda: LoraConfig(r=0, lora_alpha="x", nonsense=1)).splitlines()
    assert lines[0] == "LoraConfig has 3 problems:"
    assert [line.split()[1] for line in lines[1:]] == ["r", "lora_alpha", "unknown"]


def test_problems_of_all_sections_are_listed_together() -> None:
    text = message(lambda: Config(model={}, lora={"r": 0}, train={"seed": "x"}))
    assert "has 3 problems" in text
    assert "model.path is required" in text
    assert "lora.r in Config must be at least 1, got 0" in text
    assert "train.seed in Config must be an integer, got 'x'" in text


@pytest.mark.parametrize(
    ("name", "meant"),
    [("rank", "r"), ("alpha", "lora_alpha"), ("lora_dropuot", "lora_dropout")],
)
def test_unknown_keywords_get_a_suggestion(name: str, meant: str) -> None:
    expected = f"unknown key '{name}' in LoraConfig: did you mean '{meant}'?"
    assert message(lambda: LoraConfig(**{name: 1})) == expected


def test_positional_arguments_are_refused() -> None:
    assert message(lambda: LoraConfig(8)) == "LoraConfig takes keyword arguments only"


def test_a_section_of_the_wrong_kind() -> None:
    text = message(lambda: Config(model={"path": "x"}, lora=3))
    assert text == "lora in Config must be a section of keys, got 3"
    assert "must be a section" in message(lambda: Config(model={"path": "x"}, lora=QuantConfig()))


def test_sections_are_frozen() -> None:
    lora = LoraConfig()
    assert "model_copy" in message(lambda: setattr(lora, "r", 3))
    assert "cannot be deleted" in message(lambda: delattr(lora, "r"))
    assert lora == LoraConfig()


def test_a_changed_copy_is_checked() -> None:
    assert LoraConfig().model_copy(update={"r": 4}) == LoraConfig(r=4)
    assert "at least 1" in message(lambda: LoraConfig().model_copy(update={"r": 0}))
    assert "did you mean 'r'" in message(lambda: LoraConfig().model_copy(update={"rank": 4}))
    config = Config(model={"path": "x"})
    assert config.model_copy(update={"lora": LoraConfig(r=2)}).lora.r == 2
    assert config.lora.r == 16


def test_model_validate_raises_the_same_error() -> None:
    assert "at least 1" in message(lambda: LoraConfig.model_validate({"r": 0}))


def test_require_train() -> None:
    assert "data.train is required" in message(Config(model={"path": "x"}).require_train)
    config = Config(model={"path": "x"}, data={"train": "a.jsonl"})
    assert config.require_train().train == "a.jsonl"


def test_long_values_are_cut_in_messages() -> None:
    assert len(message(lambda: LoraConfig(r="x" * 10_000))) < 200
    assert "a huge integer" in message(lambda: TrainConfig(seed=10**10_000))


def test_lion_has_the_decay_that_it_was_published_with() -> None:
    assert OptimConfig(name="lion").adam_beta2 == OptimConfig(name="Lion_32bit").adam_beta2 == 0.99
    assert OptimConfig(name="lion", adam_beta2=0.98).adam_beta2 == 0.98
    assert OptimConfig(name="adamw").adam_beta2 == 0.999
    assert "8-bit Lion is not supported" in message(lambda: OptimConfig(name="lion_8bit"))


def test_another_optimizer_of_a_copy_comes_with_its_own_decay() -> None:
    """Unless somebody said one: settings are copied in Python, where no file is read again."""
    plain = OptimConfig()
    lion = plain.model_copy(update={"name": "lion"})
    assert (lion.adam_beta2, lion.model_copy(update={"name": "adamw"}).adam_beta2) == (0.99, 0.999)
    assert OptimConfig(name="lion").model_copy(update={"name": "adamw_8bit"}).adam_beta2 == 0.999
    for said in (0.95, 0.999):
        own = OptimConfig(adam_beta2=said)
        assert own.model_copy(update={"name": "lion"}).adam_beta2 == said
    both = {"name": "lion", "adam_beta2": 0.9}
    assert plain.model_copy(update=both).adam_beta2 == 0.9
    assert plain.model_copy(update={"learning_rate": 1e-3}).adam_beta2 == 0.999


def test_a_mapping_is_no_file() -> None:
    text = message(lambda: load_config({"model": {"path": "x"}}))
    assert text.startswith("load_config expects the path of a YAML file, got dict: for a")


def test_text_that_is_no_text() -> None:
    text = message(lambda: Config(model={"path": "x"}, data={"train": "k\udcc3\udca4.jsonl"}))
    assert "data.train in Config must be UTF-8 text (set an environment variable such as" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"), (True, "true"), ("a", "'a'"), ([1, "b"], "[1, 'b']"),
        ({"a": None}, "{a: null}"), ({"a" * 999: 1}, "a mapping"),
        (object(), "a value of type object"),
        pytest.param(10**9999, "a huge integer", id="huge"),
    ],
)  # fmt: skip
def test_values_are_shown_as_users_write_them(value, text):
    assert shown(value) == text


def test_long_values_are_cut_to_the_most_that_is_shown():
    texts = [shown("x" * length) for length in range(999)]
    lengths = [len(text) for text in texts]
    assert {b - a for a, b in pairwise(lengths)} == {0, 1} and lengths == sorted(lengths)
    assert texts[-1].endswith("...")
