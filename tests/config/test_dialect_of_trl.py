"""TRL's files, converted value by value."""

from pathlib import Path

import pytest
from support.dialects import converted, reasons_of

from qlora_wgpu.config.dialects import trl
from qlora_wgpu.errors import ConfigError

DEFAULTED = (
    "learning_rate num_train_epochs per_device_train_batch_size lr_scheduler_type "
    "assistant_only_loss warmup_ratio lora_r"
)


def test_trl(place):
    config, conversion = converted(place, "trl.yaml")
    assert (config.lora.r, config.lora.lora_alpha, config.lora.lora_dropout) == (16, 32, 0.05)
    assert (config.data.train, config.data.eval) == (
        str(place / "chats"),
        str(place / "chats:test"),
    )
    assert config.data.train_on == "assistant"
    assert config.train.gradient_accumulation_steps == 8
    assert (config.eval.eval_steps, config.optim.warmup_ratio) == (100, 0.1)
    assert not conversion.notes
    config, conversion = converted(
        place,
        "trl.yaml",
        dict.fromkeys(DEFAULTED.split(), "LEAVE OUT"),
    )
    assert (config.optim.learning_rate, config.train.num_train_epochs) == (2e-5, 3)
    assert (config.train.per_device_train_batch_size, config.optim.warmup_ratio) == (8, 0)
    assert config.optim.lr_scheduler_type == "linear"
    assert any("TRL takes the loss on all tokens" in note for note in conversion.notes)


def test_the_alignment_handbooks_mixture(place):
    changes = {
        "dataset_name": "LEAVE OUT",
        "dataset_mixer": {"o/chats": 1.0, "o/more": 0.5},
        "dataset_splits": ["train_sft", "test_sft"],
    }
    data = converted(place, "trl.yaml", changes)[0].data
    assert [(source.path, source.rows) for source in data.sources] == [
        ("o/chats:train_sft", None),
        ("o/more:train_sft[:50%]", None),
    ]
    assert data.eval == "o/chats:test_sft"
    more = {"dataset_configs": ["all", "tiny"], "dataset_splits": ["train"], "text_column": "body"}
    config, _ = converted(place, "trl.yaml", {**changes, **more})
    assert [source.path for source in config.data.sources] == [
        "o/chats:all/train",
        "o/more:tiny/train[:50%]",
    ]
    assert (config.data.eval, config.data.format, config.data.columns) == (
        None,
        "text",
        {"text": "body"},
    )
    with pytest.raises(ConfigError, match=r"dataset_configs: .* must have 2 entries"):
        converted(place, "trl.yaml", {**changes, "dataset_configs": ["all"]})
    with pytest.raises(ConfigError, match=r"dataset_splits: .* must include a split to train on"):
        converted(place, "trl.yaml", {**changes, "dataset_splits": ["test"]})


@pytest.mark.parametrize("key", ["model_revision", "revision_of_model"])
@pytest.mark.parametrize("name", ["trl.yaml", "llama_factory.yaml", "axolotl.yml"])
def test_another_revision_of_the_model_stands_behind_its_name(place, name, key):
    model = "base_model" if name.startswith("axolotl") else "model_name_or_path"
    for revision, path in (("main", "o/m"), ("it-mid", "o/m@it-mid")):
        config, conversion = converted(place, name, {model: "o/m", key: revision})
        assert config.model.path == path
        assert not any(key in left for left in reasons_of(conversion))


def test_a_revision_of_what_is_no_name_of_the_hub_is_left_out(place):
    (place / "o" / "m").mkdir(parents=True)
    changes = {"model_name_or_path": "o/m", "model_revision": "it-mid"}
    config, conversion = converted(place, "trl.yaml", changes)
    assert config.model.path == str(place / "o/m")
    assert "is a local folder" in reasons_of(conversion)["model_revision: it-mid"]
    config, conversion = converted(place, "trl.yaml", changes, {"model.path": "x/y"})
    assert config.model.path == "x/y"
    assert "OWNER/NAME@REVISION" in reasons_of(conversion)["model_revision: it-mid"]


@pytest.mark.parametrize("name", ["trl.yaml", "llama_factory.yaml", "axolotl.yml"])
@pytest.mark.parametrize("steps", [0, -1, -5])
def test_a_number_of_steps_that_is_none_counts_epochs(place, name, steps):
    config, _ = converted(place, name, {"max_steps": steps, "save_total_limit": steps})
    assert config.train.max_steps == -1 and config.output.save_total_limit is None


@pytest.mark.parametrize("name", ["trl.yaml", "llama_factory.yaml", "axolotl.yml", "mlx_lm.yaml"])
def test_checkpoints_are_all_kept_where_theirs_are(place, name):
    assert (
        converted(place, name, {"save_total_limit": "LEAVE OUT"})[0].output.save_total_limit is None
    )


@pytest.mark.parametrize("key", ["columns", "streaming"])
def test_every_key_of_a_mixture_is_named(place, key):
    sets = [{"path": "o/a", key: ["messages"]}]
    _, conversion = converted(place, "trl.yaml", {"dataset_name": None, "datasets": sets})
    assert f"datasets[0].{key}: ['messages']" in reasons_of(conversion)


def test_slices_of_splits_are_taken_over(place):
    sets = [{"path": "o/a", "split": "train[:10%]"}, {"path": "o/b", "split": "train+test[5:]"}]
    data = converted(place, "trl.yaml", {"dataset_name": None, "datasets": sets})[0].data
    assert [source.path for source in data.sources] == ["o/a[:10%]", "o/b", "o/b:test[5:]"]


def test_trls_mixture(place):
    sets = [{"path": "o/a"}, {"path": "o/b", "name": "main", "split": "test"}]
    changes = {"dataset_name": "LEAVE OUT", "datasets": sets, "test_split_size": 0.1}
    data = converted(place, "trl.yaml", changes)[0].data
    assert [source.path for source in data.sources] == ["o/a", "o/b:main/test"]
    assert data.eval_split == 0.1


def test_shares_of_trls_mixtures(place):
    sets = [{"path": "o/a", "fraction": 0.75}, {"path": "o/b", "fraction": 0.25}]
    data = converted(place, "trl.yaml", {"dataset_name": None, "datasets": sets})[0].data
    assert [source.weight for source in data.sources] == [0.75, 0.25]
    assert data.stopping_strategy == "first_exhausted"
    mixture = {
        "datasets": [
            {"id": "o/a", "config": "main", "split": "train_sft", "weight": 1.0},
            {"id": "o/b", "split": "train_sft", "weight": 0.5},
        ],
        "test_split_size": 100,
        "seed": 0,
    }
    changes = {"dataset_name": None, "dataset_mixture": mixture}
    config, _ = converted(place, "trl.yaml", changes)
    assert [(source.path, source.rows) for source in config.data.sources] == [
        ("o/a:main/train_sft", None),
        ("o/b:train_sft", 0.5),
    ]
    assert (config.data.eval_split, config.eval.eval_steps) == (100, 100)


def test_files_of_trls_mixture(place):
    sets = [
        {"path": "json", "data_files": ["a.json", "b.json"], "fraction": 0.5},
        {"path": "o/c", "data_dir": "en", "data_files": {"train": "c.json"}},
    ]
    config, conversion = converted(place, "trl.yaml", {"dataset_name": None, "datasets": sets})
    assert [Path(source.path).name for source in config.data.sources] == [
        "a.json", "b.json", "c"]  # fmt: skip
    reasons = reasons_of(conversion)
    assert {"datasets[0]: {weight}", "datasets[1].data_dir: en", "datasets[1].data_files: {train}"
            } <= reasons.keys()  # fmt: skip


@pytest.mark.parametrize(("loss", "ours"), [("nll", None), ("chunked_nll", None), ("dft", "dft")])
def test_losses_of_trl(place, loss, ours):
    assert converted(place, "trl.yaml", {"loss_type": loss})[0].train.loss_type == ours


def test_packing_that_splits_rows_is_noted(place):
    conversion = converted(place, "trl.yaml", {"packing_strategy": "wrapped"})[1]
    assert any("wrapped splits rows" in note for note in conversion.notes)
    conversion = converted(place, "trl.yaml", {"packing_strategy": "bfd"})[1]
    assert not any("wrapped" in note for note in conversion.notes)


@pytest.mark.parametrize(
    ("name", "schedule", "seen"),
    [
        ("trl.yaml", "lr_scheduler_type", "warmup_ratio: 0.1"),
        ("llama_factory.yaml", "lr_scheduler_type", ""),
        ("axolotl.yml", "lr_scheduler", "warmup_steps: 10"),
    ],
)
def test_a_constant_rate_has_no_warm_up_as_in_transformers(place, name, schedule, seen):
    config, conversion = converted(place, name, {schedule: "constant"})
    assert config.optim.lr_scheduler_type == "constant"
    assert not seen or "constant_with_warmup" in reasons_of(conversion)[seen]


@pytest.mark.parametrize("name", ["trl.yaml", "llama_factory.yaml", "axolotl.yml"])
def test_no_warm_up_stays_none(place, name):
    changes = {"warmup_steps": 0, "warmup_ratio": "LEAVE OUT"}
    optim = converted(place, name, changes)[0].optim
    assert (optim.warmup_steps, optim.warmup_ratio) == (0, 0.0)


@pytest.mark.parametrize(
    ("name", "logging", "expected"),
    [("trl.yaml", 7, 7), ("trl.yaml", None, 10), ("llama_factory.yaml", None, 500)],
)
def test_evaluations_go_by_logging_steps_where_they_have_none(place, name, logging, expected):
    changes = {"eval_strategy": "steps", "eval_steps": "LEAVE OUT", "logging_steps": logging}
    assert converted(place, name, changes)[0].eval.eval_steps == expected


def test_modules_that_trl_and_axolotl_do_not_name_are_pefts(place):
    for name in ("trl.yaml", "axolotl.yml"):
        changes = {"lora_target_modules": None, "lora_target_linear": None}
        config = converted(place, name, changes)[0]
        assert config.lora.target_modules == ["q_proj", "v_proj"]


def test_trl_quantizes_scales_only_where_it_is_asked_to(place):
    assert not converted(place, "trl.yaml")[0].quant.double_quant
    assert converted(place, "trl.yaml", {"use_bnb_nested_quant": True})[0].quant.double_quant


def test_held_out_data_of_older_trl(place):
    changes = {"eval_strategy": "LEAVE OUT", "evaluation_strategy": "steps"}
    config, _ = converted(place, "trl.yaml", changes)
    assert config.data.eval == str(place / "chats:test")


def test_one_file_has_no_test_split(place):
    (place / "rows.jsonl").touch()
    config, conversion = converted(place, "trl.yaml", {"dataset_name": "rows.jsonl"})
    assert config.data.eval is None
    assert "data.eval_split" in reasons_of(conversion)["eval_strategy: steps"]


def test_a_template_in_trls_file_is_taken(place):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert converted(place, "trl.yaml", {"chat_template": template})[0].data.chat_template == (
        template
    )


@pytest.mark.parametrize("name", ["trl.yaml", "llama_factory.yaml"])
def test_steps_that_are_shares_of_a_run_are_left_out(place, name):
    changes = {"logging_steps": 0.1, "save_steps": 0.5}
    reasons = reasons_of(converted(place, name, changes)[1])
    assert all(
        "must be an integer" in reasons[key] for key in ("logging_steps: 0.1", "save_steps: 0.5")
    )


def test_a_split_of_files_is_theirs(place):
    sets = [{"path": "json", "data_files": ["a.json"], "split": "train[:10%]"}]
    data = converted(place, "trl.yaml", {"dataset_name": None, "datasets": sets})[0].data
    assert data.train.endswith("a.json[:10%]")
    sets[0]["data_files"].append("b.json")
    _, conversion = converted(place, "trl.yaml", {"dataset_name": None, "datasets": sets})
    assert "datasets[0].split: train[:10%]" in reasons_of(conversion)


@pytest.mark.parametrize(("given", "expected", "dropped"), [
    ("wandb", ["wandb"], ""), (["tensorboard", "comet_ml"], ["tensorboard"], "comet_ml"),
    ("comet_ml", [], "comet_ml"), (["none"], [], ""), ("none", [], ""),
])  # fmt: skip
def test_logs_go_to_one_place_or_to_several(place, given, expected, dropped):
    config, conversion = converted(place, "trl.yaml", {"report_to": given})
    assert config.log.report_to == expected
    named = [key for key in reasons_of(conversion) if key.startswith("report_to")]
    assert named == ([f"report_to: ['{dropped}']"] if dropped else [])


@pytest.mark.parametrize(("epochs", "steps"), [(0.5, 0), (1.0, 0), (4.0, 0.25)])
def test_evaluations_by_epoch_are_fractions_of_the_run(epochs, steps):
    assert trl.fraction_of_run(1, epochs) == steps
