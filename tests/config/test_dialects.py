"""Other trainers' files: known by their keys, converted value by value, nothing lost in silence."""

import json
import re
import shutil
from pathlib import Path

import pytest

from qlora_wgpu import load_config
from qlora_wgpu.config import Config, TrainConfig
from qlora_wgpu.config.dialects.conversion import DIALECTS, convert_file, dialect_of, key_for
from qlora_wgpu.config.dialects.reasons import reason_for
from qlora_wgpu.config.schema import sections
from qlora_wgpu.config.suggestions import suggest_key
from qlora_wgpu.config.synonyms import KEY_OF
from qlora_wgpu.config.yaml_file import read_yaml_file
from qlora_wgpu.errors import ConfigError

FILES = Path(__file__).parent / "dialects"
NAMES = {
    "axolotl.yml": "Axolotl",
    "trl.yaml": "TRL",
    "llama_factory.yaml": "LLaMA-Factory",
    "llama_factory_v1.yaml": "LLaMA-Factory (v1)",
    "mlx_lm.yaml": "mlx-lm",
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in FILES.iterdir():
        shutil.copy(file, tmp_path)
    (tmp_path / "data").mkdir()
    info = {
        "mine": {
            "file_name": "mine.json",
            "columns": {"prompt": "question", "query": "context", "response": "answer"},
        },
        "chats": {
            "file_name": "chats.json",
            "formatting": "sharegpt",
            "columns": {"messages": "messages"},
            "tags": {"role_tag": "role", "content_tag": "content"},
        },
        "pairs": {"file_name": "pairs.json", "ranking": True},
        "hub": {"hf_hub_url": "owner/name", "subset": "main", "split": "test"},
    }
    (tmp_path / "data" / "identity.json").write_text("[]")
    sets = "identity: {path: data/identity.json, source: local, converter: alpaca}\n"
    (tmp_path / "sets.yaml").write_text(sets + "more: {path: o/n}\n")
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    return tmp_path


def converted(place, name, changes=None, given=None, layers=2):
    """The configuration that a file becomes, with some of its keys changed."""
    values = {**read_yaml_file(place / name).values, **(changes or {})}
    values = {key: value for key, value in values.items() if value != "LEAVE OUT"}
    (place / "theirs.json").write_text(json.dumps(values))
    conversion = convert_file(place / "theirs.json", given or {}, lambda model: layers)
    (place / "run.yaml").write_text(conversion.text())
    return load_config(place / "run.yaml"), conversion


@pytest.mark.parametrize("name", NAMES)
def test_files_are_known_by_their_keys(place, name):
    assert dialect_of(read_yaml_file(place / name).values).name == NAMES[name]


def test_a_file_of_ours_is_no_other_trainers():
    values = Config(model={"path": "m"}).model_dump()
    assert dialect_of(values) is None
    assert dialect_of({**values, "base_model": "m", "learning_rate": 1e-4}) is None
    assert dialect_of({}) is None


@pytest.mark.parametrize("name", NAMES)
def test_every_key_is_taken_over_or_named(place, name):
    """Each value that is set there stands in the file, as a setting or with a reason."""
    conversion = convert_file(place / name, {}, lambda model: 2)
    result = conversion.text()
    consumed = {"load_in_8bit", "train_on_inputs", "use_peft", "stage", "finetuning_type", "data",
                "eval_strategy", "dataset_dir", "fine_tune_type", "dataset_train_split",
                "lora_parameters", "report_to", "peft_config", "quant_config",
                "batching_strategy"}  # fmt: skip
    for key in read_yaml_file(place / name).values:
        ours = key_for(key)
        is_named = re.search(rf"\b{key}\b", result) is not None
        assert is_named or key in consumed or (ours and ".".join(ours) in conversion.taken), key
    assert not [left for left in conversion.left_out if left.reason == "no counterpart here"]


@pytest.mark.parametrize("name", NAMES)
def test_errors_begin_with_what_converts_the_file(place, name):
    with pytest.raises(ConfigError) as caught:
        load_config(place / name)
    start = f"`qlora-wgpu init --from {place / name}` converts this file, which is one of"
    assert str(caught.value).startswith(f"{start} {NAMES[name]}")
    assert "\n" not in str(caught.value)


def test_axolotl(place):
    config, _ = converted(place, "axolotl.yml")
    assert (config.quant.scheme, config.lora.target_modules) == ("nf4", "all-linear")
    assert (config.lora.r, config.lora.lora_alpha, config.lora.lora_dropout) == (32, 16, 0.05)
    assert (config.data.format, config.data.eval_split) == ("instruction/output", 0.05)
    assert (config.data.max_seq_length, config.data.packing) == (512, True)
    assert config.data.truncation == "drop"
    assert config.train.per_device_train_batch_size == 2
    assert (config.train.num_train_epochs, config.train.seed) == (4, 42)
    assert (config.optim.warmup_steps, config.optim.lr_scheduler_type) == (10, "cosine")
    assert config.eval.eval_steps == 1 / 16  # four times in each of four epochs


@pytest.mark.parametrize(
    ("optimizer", "expected", "said"),
    [
        ("adamw_bnb_8bit", "adamw_8bit", "optimizer: adamw_bnb_8bit"),
        ("paged_adamw_8bit", "adamw_8bit", "optimizer: paged_adamw_8bit"),
        ("adamw_torch_fused", "adamw", "optimizer: adamw_torch_fused"),
        ("ao_adamw_8bit", "adamw_8bit", "nearest to optimizer: ao_adamw_8bit"),
        ("lion_8bit", "adamw", "another is not done"),
    ],
)
def test_optimizers_of_axolotl(place, optimizer, expected, said):
    config, conversion = converted(place, "axolotl.yml", {"optimizer": optimizer})
    assert config.optim.name == expected and said in conversion.text()


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"path": "o/n", "type": "alpaca"}, ("o/n", "instruction/output", {})),
        ({"path": "o/n", "type": "completion", "field": "story"},
         ("o/n", "text", {"text": "story"})),
        ({"path": "o/n", "split": "validation", "type": "chat_template"},
         ("o/n:validation", "messages", {})),
        ({"path": "o/n", "name": "main", "type": "chat_template", "field_messages": "chat"},
         ("o/n:main/train", "messages", {"messages": "chat"})),
        ({"path": "o/n", "type": "chat_template", "field_messages": "conversations",
          "message_property_mappings": {"role": "from", "content": "value"}},
         ("o/n", "conversations", {})),
        ({"path": "o/n", "type": "sharegpt"}, ("o/n", "conversations", {})),
        ({"path": "json", "data_files": ["a.json"], "type": {"field_instruction": "q",
          "field_output": "a"}},
         ("a.json", "instruction/output", {"instruction": "q", "output": "a"})),
        ({"path": "o/n", "type": "alpaca_chat.load_qa"},
         ("o/n", "auto", {"prompt": "question", "completion": "answer"})),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_data_of_axolotl(place, entry, expected):
    data = converted(place, "axolotl.yml", {"datasets": [entry]})[0].data
    train = data.train.removeprefix(f"{place}/")
    assert (train, data.format, data.columns) == expected


def test_more_of_axolotl(place):
    config, conversion = converted(
        place,
        "axolotl.yml",
        {
            "datasets": [{"path": "a.jsonl", "type": "alpaca"}, {"path": "b.jsonl"}],
            "adapter": "lora",
            "load_in_4bit": False,
            "lora_target_linear": False,
            "lora_target_modules": ["q_proj"],
            "val_set_size": 20,
            "train_on_inputs": True,
            "chat_template": "chatml",
            "warmup_steps": "LEAVE OUT",
            "lr_scheduler": "one_cycle",
        },
    )
    assert (config.quant.scheme, config.lora.target_modules) == ("none", ["q_proj"])
    assert (config.data.eval_split, config.data.train_on) == (20, "all")
    assert config.data.chat_template == "chatml"
    assert (config.optim.warmup_steps, config.optim.warmup_ratio) == (0, 0.03)
    reasons = {left.key: left.reason for left in conversion.left_out}
    assert "put the files" in reasons["datasets (number 2): b.jsonl"]
    assert "the shapes are" in reasons["lr_scheduler: one_cycle"]


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
    assert any("TRL learns every token" in note for note in conversion.notes)


def test_the_alignment_handbooks_mixture(place):
    changes = {
        "dataset_name": "LEAVE OUT",
        "dataset_mixer": {"o/chats": 1.0, "o/more": 0.5},
        "dataset_splits": ["train_sft", "test_sft"],
    }
    config, conversion = converted(place, "trl.yaml", changes)
    assert (config.data.train, config.data.eval) == ("o/chats:train_sft", "o/chats:test_sft")
    assert any("o/more" in left.key for left in conversion.left_out)


def test_llama_factory(place):
    config, _ = converted(place, "llama_factory.yaml")
    assert config.data.train == str(place / "data/mine.json")
    columns = {"instruction": "question", "input": "context", "output": "answer"}
    assert (config.data.format, config.data.columns) == ("instruction/output", columns)
    assert (config.data.eval_split, config.data.max_seq_length) == (0.1, 512)
    assert (config.lora.lora_alpha, config.lora.target_modules) == (16, "all-linear")
    assert config.train.gradient_checkpointing
    data = converted(place, "llama_factory.yaml", {"dataset": "chats", "mask_history": True})[
        0
    ].data
    assert (data.format, data.columns, data.train_on) == ("messages", {}, "last_turn")
    data = converted(place, "llama_factory.yaml", {"dataset": ["hub"], "eval_dataset": "mine"})[
        0
    ].data
    assert (data.train, data.eval) == ("owner/name:main/test", str(place / "data/mine.json"))
    assert data.eval_split is None
    with pytest.raises(ConfigError, match="describes no data set 'nothing'"):
        converted(place, "llama_factory.yaml", {"dataset": "nothing"})


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("axolotl.yml", {"rl": "dpo"}, "rl: dpo is no supervised fine-tuning"),
        ("llama_factory.yaml", {"stage": "dpo"}, "stage: dpo is no supervised fine-tuning"),
        ("llama_factory.yaml", {"dataset": "pairs"}, "dataset: pairs holds preferences"),
        ("mlx_lm.yaml", {"training_mode": "orpo"}, "training_mode: orpo is not done"),
        ("axolotl.yml", {"base_model": None}, "names no model: name it with --model"),
        ("axolotl.yml", {"datasets": None}, "names no data: name it with --data"),
        ("axolotl.yml", {"lora_r": -3}, "must be at least 1, got -3"),
        ("axolotl.yml", {"val_set_size": "many"}, "a value is not as Axolotl takes it"),
    ],
)  # fmt: skip
def test_files_that_train_something_else(place, name, changes, reason):
    with pytest.raises(ConfigError, match=re.escape(reason)):
        converted(place, name, changes)


def test_mlx_lm(place):
    (place / "mlxdata").mkdir()
    (place / "mlxdata" / "valid.jsonl").touch()
    config, _ = converted(place, "mlx_lm.yaml")
    assert (config.lora.r, config.lora.lora_alpha) == (8, 160)  # scale is alpha / r
    assert config.lora.scaling == 20
    assert config.lora.target_modules == ["q_proj", "v_proj"]
    assert config.lora.layers_to_transform == [1]
    assert config.data.train == config.data.eval == str(place / "mlxdata")
    assert (config.data.train_on, config.train.max_steps) == ("all", 1000)
    assert (config.optim.lr_scheduler_type, config.optim.warmup_steps) == ("cosine", 100)
    assert (config.optim.weight_decay, config.optim.max_grad_norm) == (0.01, 0)
    config, conversion = converted(
        place,
        "mlx_lm.yaml",
        {"grad_accumulation_steps": 4, "mask_prompt": True, "lr_schedule": None,
         "optimizer": "adam",
         "lora_parameters": {"rank": 4, "alpha": 8, "dropout": 0.1}, "num_layers": -1,
         "fine_tune_type": "lora", "model": "mlx-community/x-4bit"},
    )  # fmt: skip
    assert (config.train.max_steps, config.eval.eval_steps) == (250, 50)
    assert (config.lora.lora_alpha, config.lora.layers_to_transform) == (8, None)
    assert (config.data.train_on, config.optim.lr_scheduler_type) == ("last_turn", "constant")
    assert (config.optim.weight_decay, config.quant.scheme) == (0, "nf4")
    assert any("--model" in note for note in conversion.notes)


def test_llama_factory_v1(place):
    config, conversion = converted(place, "llama_factory_v1.yaml")
    assert (config.quant.scheme, config.lora.r, config.lora.lora_alpha) == ("nf4", 8, 32)
    assert config.lora.target_modules == "all-linear"
    assert config.data.train == str(place / "data" / "identity.json")
    assert (config.data.format, config.data.max_seq_length) == ("instruction/output", 512)
    train = config.train
    assert (train.per_device_train_batch_size, train.gradient_accumulation_steps) == (2, 4)
    assert (train.max_steps, train.compute_dtype) == (10, "bfloat16")
    assert (config.optim.lr_scheduler_type, config.optim.learning_rate) == ("constant", 1e-4)
    assert "train_dataset: more" in reasons_of(conversion)
    changes = {"train_dataset": "rows.jsonl", "peft_config": {"name": "freeze"},
               "quant_config": None, "batching_strategy": "padding_free"}  # fmt: skip
    config, conversion = converted(place, "llama_factory_v1.yaml", changes)
    assert (config.quant.scheme, config.data.packing) == ("none", True)
    assert any("freeze trains other weights" in note for note in conversion.notes)
    (place / "sets.yaml").write_text("pairs: {path: pairs.jsonl, converter: pair}")
    with pytest.raises(ConfigError, match="holds preferences"):
        converted(place, "llama_factory_v1.yaml")


def test_what_is_given_wins(place):
    given = {"model.path": "other", "data.train": "x.jsonl", "data.eval": "y.jsonl"}
    config, _ = converted(place, "axolotl.yml", given=given)
    assert config.model.path == "other" and config.data.eval_split is None
    assert config.data.eval == str(place / "y.jsonl")


def test_no_text_of_theirs_writes_into_the_file(place):
    name = "a\nlora: {r: 9}\n#"
    changes = {"base_model": name, "foo\nbar": name, "wandb_name": name}
    config, _ = converted(place, "axolotl.yml", changes)
    assert config.model.path == name and config.lora.r == 32


def test_files_that_cannot_be_read(place):
    (place / "a.json").write_text("[1]")
    (place / "b.json").write_text("{")
    (place / "c.yaml").write_text("a: 1")
    reasons = {
        "a.json": "must hold a JSON object",
        "b.json": "is not valid JSON",
        "c.yaml": "file of none of Axolotl",
        "d.json": "cannot be read",
    }
    for name, reason in reasons.items():
        with pytest.raises(ConfigError, match=reason):
            convert_file(place / name, {})


def test_tables_name_keys_that_there_are():
    ours = {f"{section}.{leaf}" for section, leaves in sections().items() for leaf in leaves}
    for dialect in DIALECTS:
        assert {*dialect.keys.values(), *dialect.defaults} <= ours
        assert not [key for key in dialect.keys if reason_for(key)]
    assert {".".join(key) for key in KEY_OF.values()} <= ours


@pytest.mark.parametrize(
    ("loc", "expected"),
    [
        (("adapter",), ": not needed here: every run trains an adapter"),
        (("per_device_eval_batch_size",), ": not needed here: held-out data is measured with"),
        (("train", "per_device_eval_batch_size"), ": not needed here: held-out data is measured"),
        (("flash_attention",), ": not needed here: attention"),
        (("train", "deepspeed"), ": no counterpart here: a run takes one GPU"),
        (("lora", "modules_to_save"), ": no counterpart here: embeddings"),
        (("lora", "scale"), ": it is lora.lora_alpha / lora.r"),
        (("num_layers",), ": lora.layers_to_transform lists"),
        (("micro_batch_size",), ": did you mean 'train.per_device_train_batch_size'?"),
        (("cutoff_len",), ": did you mean 'data.max_seq_length'?"),
        (("lora", "lora_rank"), ": did you mean 'lora.r'?"),
        (("optim", "adam_bta1"), ": did you mean 'optim.adam_beta1'?"),
    ],
)
def test_hints_about_unknown_keys(loc, expected):
    assert suggest_key(loc).startswith(expected)


def test_hints_in_python():
    with pytest.raises(ConfigError, match="not needed here: held-out data is measured with"):
        TrainConfig(per_device_eval_batch_size=8)


def test_no_hint_names_the_opposite():
    hint = suggest_key(("train", "per_device_eval_batchsize"))
    assert hint.startswith(": the keys of 'train' are")


def reasons_of(conversion):
    return {left.key: left.reason for left in conversion.left_out}


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
    assert all("whole number" in reasons[key] for key in ("logging_steps: 0.1", "save_steps: 0.5"))


def test_further_files_of_axolotls_data_are_named(place):
    entry = {"path": "json", "data_files": ["a.json", "b.json"]}
    assert "data_files: b.json" in reasons_of(
        converted(place, "axolotl.yml", {"datasets": [entry]})[1]
    )


@pytest.mark.parametrize(
    ("tags", "is_told"),
    [
        ({"role_tag": "role", "content_tag": "content", "user_tag": "user"}, False),
        ({"user_tag": "human", "assistant_tag": "gpt"}, False),
        ({}, False),
        ({"role_tag": "speaker", "content_tag": "said"}, True),
        ({"user_tag": "U", "assistant_tag": "B"}, True),
    ],
)
def test_tags_of_llama_factory_that_rows_may_not_have(place, tags, is_told):
    path = place / "data" / "dataset_info.json"
    entry = {"file_name": "chats.json", "formatting": "sharegpt", "tags": tags}
    path.write_text(json.dumps({"chats": entry}))
    conversion = converted(place, "llama_factory.yaml", {"dataset": "chats"})[1]
    assert any(key.startswith("tags: ") for key in reasons_of(conversion)) == is_told


def test_mlx_lm_counts_its_schedule_in_updates(place):
    schedule = {"name": "cosine_decay", "warmup": 100, "arguments": [1e-5, 1000]}
    changes = {"grad_accumulation_steps": 4, "lr_schedule": schedule}
    config, conversion = converted(place, "mlx_lm.yaml", changes)
    assert (config.train.max_steps, config.optim.warmup_steps) == (250, 100)
    assert any("falls to zero" in note for note in conversion.notes)  # there after 1000 updates


@pytest.mark.parametrize(
    ("schedule", "expected", "told"),
    [
        # cosine_decay(init, decay_steps, end), linear_schedule(init, end, steps); counted after
        # the warm-up, and as long as the run is.
        (("cosine_decay", 0, [1e-4, 1000]), ("cosine", 1e-4, 0), ""),
        (("cosine_decay", 100, [1e-4, 900]), ("cosine", 1e-4, 100), ""),
        (("cosine_decay", 100, [1e-4, 1000, 1e-6]), ("cosine", 1e-4, 100), "to 1e-06 after 1100"),
        (("linear_schedule", 0, [1e-4, 0, 1000]), ("linear", 1e-4, 0), ""),
        (("linear_schedule", 0, [1e-4, 1e-5, 500]), ("linear", 1e-4, 0), "to 1e-05 after 500"),
        (("linear_schedule", 0, [0, 1e-4, 50]), ("constant_with_warmup", 1e-4, 50), ""),
        (("linear_schedule", 0, [1e-4, 1e-4, 50]), ("constant", 1e-4, 0), ""),
        (("step_decay", 10, [1e-4, 0.9, 10]), ("constant_with_warmup", 1e-4, 10), ""),
    ],
)
def test_mlx_lm_s_schedules(place, schedule, expected, told):
    name, warmup, arguments = schedule
    changes = {"lr_schedule": {"name": name, "warmup": warmup, "arguments": arguments}}
    config, conversion = converted(place, "mlx_lm.yaml", changes)
    optim = config.optim
    assert (optim.lr_scheduler_type, optim.learning_rate, optim.warmup_steps) == expected
    notes = [note for note in conversion.notes if "falls to zero" in note]
    assert len(notes) == bool(told) and all(told in note for note in notes)
    assert ("lr_schedule: step_decay" in reasons_of(conversion)) == (name == "step_decay")


def test_mlx_lm_s_services(place):
    config, conversion = converted(place, "mlx_lm.yaml", {"report_to": "swanlab,wandb"})
    assert config.log.report_to == ["wandb"] and "report_to: swanlab" in reasons_of(conversion)
    assert converted(place, "mlx_lm.yaml", {"report_to": "swanlab"})[0].log.report_to == []


def test_slices_of_one_split_do_not_measure_what_is_learnt(place):
    hub = {"path": "o/n", "train_split": "train[:90%]", "valid_split": "train[-10%:]"}
    config, conversion = converted(place, "mlx_lm.yaml", {"hf_dataset": hub})
    assert (config.data.train, config.data.eval, config.data.eval_split) == ("o/n", None, 0.1)
    hub["valid_split"] = "train[:100]"
    config, conversion = converted(place, "mlx_lm.yaml", {"hf_dataset": [hub, {"path": "o/more"}]})
    assert (config.data.eval, config.data.eval_split) == (None, None)
    reasons = reasons_of(conversion)
    assert "valid_split: train[:100]" in reasons and "hf_dataset: o/more" in reasons
    config, _ = converted(place, "mlx_lm.yaml", {"hf_dataset": {"path": "o/n"}})
    assert config.data.eval_split == 0.1  # what mlx-lm takes of its own accord


@pytest.mark.parametrize(("given", "count"), [({}, 1), ({"model.path": "m"}, 0)])
def test_a_model_in_mlxs_form_is_told_where_no_other_is_given(place, given, count):
    changes = {"model": "mlx-community/some-4bit"}
    notes = converted(place, "mlx_lm.yaml", changes, given)[1].notes
    assert sum("in MLX's form" in note for note in notes) == count


def test_placeholders_are_told(place):
    notes = converted(place, "axolotl.yml", {"output_dir": "${OUT}/qwen"})[1].notes
    assert "${OUT} in output.dir is not filled in: write the value out" in notes


ALIASES = """\
shared: &shared
  r: 8
  lora_alpha: 16
.more: &more {learning_rate: 1e-3, num_epochs: 2}
base_model: base
datasets: [{path: &data rows.jsonl, type: alpaca}]
test_datasets: [{path: *data, type: alpaca}]
lora_model_dir: &none
sequence_len: 64
micro_batch_size: 3
learning_rate: 1e-4
<<: [*more, {seed: 7, learning_rate: 5e-5}]
"""


def test_anchors_and_merge_keys_of_theirs_are_written_out(place):
    (place / "aliases.yml").write_text(ALIASES)
    with pytest.raises(
        ConfigError, match=r"init --from .*aliases.yml` converts this file, .* Axolotl"
    ):
        load_config(place / "aliases.yml")
    taken = convert_file(place / "aliases.yml", {}).taken
    values = {key: taken[key].value for key in taken}
    # A mapping's own keys win, then those of the mapping that is merged first.
    assert values["optim.learning_rate"] == 1e-4
    assert (values["train.num_train_epochs"], values["train.seed"]) == (2, 7)
    assert values["data.eval"] == values["data.train"]


@pytest.mark.parametrize(
    "text",
    [
        "base_model: &a {b: *a}\n",
        "base_model: &a {<<: *a}\n",
        "a0: &a0 {x: 1}\n" + "".join(
            f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 12)
        ),
    ],
    ids=["itself", "merged into itself", "a billion merges"],
)  # fmt: skip
def test_aliases_without_end_are_refused(place, text):
    (place / "endless.yml").write_text(text)
    with pytest.raises(ConfigError, match="too large or too deep with its aliases"):
        convert_file(place / "endless.yml", {})
