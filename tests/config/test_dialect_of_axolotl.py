"""Axolotl's files, converted value by value."""

from pathlib import Path

import pytest
from support.dialects import converted, reasons_of


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
        ("lion_8bit", "lion", "nearest to optimizer: lion_8bit"),
        ("paged_lion_32bit", "lion", "optimizer: paged_lion_32bit"),
        ("lion_pytorch", "lion", "optimizer: lion_pytorch"),
        ("adafactor", "adamw", "not supported (supported: AdamW, Lion)"),
    ],
)
def test_optimizers_of_axolotl(place, optimizer, expected, said):
    config, conversion = converted(place, "axolotl.yml", {"optimizer": optimizer})
    assert config.optim.name == expected and said in conversion.text()


@pytest.mark.parametrize(("batch_size", "steps"), [(8, 4), (9, 4), (1, 1)])
def test_axolotls_batch_is_as_many_micro_batches(place, batch_size, steps):
    given = {"batch_size": batch_size, "micro_batch_size": 2, "gradient_accumulation_steps": None}
    config, _ = converted(place, "axolotl.yml", given)
    assert config.train.gradient_accumulation_steps == steps


@pytest.mark.parametrize(
    ("optimizer", "given", "beta2"),
    [
        ("lion_32bit", {}, 0.999),  # transformers passes its default on
        ("lion_32bit", {"adam_beta2": 0.98}, 0.98),
        ("lion_pytorch", {}, 0.99),
        ("adamw_torch", {}, 0.999),
    ],
)
def test_decay_of_the_moment_of_axolotls_lion(place, optimizer, given, beta2):
    config, _ = converted(place, "axolotl.yml", {"optimizer": optimizer, **given})
    assert config.optim.adam_beta2 == beta2


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


@pytest.mark.parametrize(
    ("more", "dropped"),
    [
        ({"roles_to_train": ["user", "assistant"]}, "datasets[0].roles_to_train"),
        ({"roles_to_train": []}, "datasets[0].roles_to_train"),
        ({"roles_to_train": ["gpt"], "train_on_eos": "turn", "trust_remote_code": True}, ""),
        ({"train_on_eos": "all"}, "datasets[0].train_on_eos"),
        *(({"message_field_training": key}, "") for key in ("train", "weight", "loss")),
        ({"message_field_training": "learn"}, "datasets[0].message_field_training"),
        (
            {"message_field_training_detail": "train_detail"},
            "datasets[0].message_field_training_detail",
        ),
        ({"drop_system_message": True}, "datasets[0].drop_system_message"),
        ({"shards": 10}, "datasets[0].shards"),
        ({"revision": "v1"}, "datasets[0].revision"),
    ],
)
def test_other_keys_of_axolotls_data_sets_are_dropped_by_name(place, more, dropped):
    entry = {"path": "o/n", "type": "chat_template", **more}
    conversion = converted(place, "axolotl.yml", {"datasets": [entry]})[1]
    keys = [left.key.partition(":")[0] for left in conversion.dropped if "datasets" in left.key]
    assert keys == ([dropped] if dropped else [])


def test_axolotls_other_prompts_of_alpaca_are_noted(place):
    entry = {"path": "o/n", "type": "alpaca:phi"}
    reasons = reasons_of(converted(place, "axolotl.yml", {"datasets": [entry]})[1])
    assert reasons["datasets[0].type: alpaca:phi"] == "Alpaca's original prompt is used"


@pytest.mark.parametrize(
    ("changes", "truncation", "has_note"),
    [
        ({"datasets": [{"path": "o/n", "type": "completion"}]}, "windows", False),
        ({"datasets": [{"path": "o/n", "type": "alpaca"}]}, "drop", False),
        ({"datasets": [{"path": "o/n", "type": "completion"},
                       {"path": "o/m", "type": "alpaca"}]}, "drop", True),
        ({"excess_length_strategy": "raise"}, "error", False),
        ({"excess_length_strategy": "truncate"}, "keep_start", False),
    ],
)  # fmt: skip
def test_long_rows_of_axolotl(place, changes, truncation, has_note):
    config, conversion = converted(place, "axolotl.yml", changes)
    assert config.data.truncation == truncation
    assert any("splits long text" in note for note in conversion.notes) == has_note


def test_several_test_data_sets_of_axolotl(place):
    tests = [{"path": "o/n", "split": "test"}, {"path": "o/m"}]
    config, conversion = converted(place, "axolotl.yml", {"test_datasets": tests})
    assert config.data.eval == "o/n:test"
    assert "is a single data set" in reasons_of(conversion)["test_datasets: o/m"]


def test_a_template_of_axolotls_data_set(place):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    entry = {"path": "o/n", "type": "chat_template", "chat_template": "jinja",
             "chat_template_jinja": template}  # fmt: skip
    config = converted(place, "axolotl.yml", {"datasets": [entry]})[0]
    assert config.data.chat_template == template


def test_the_column_of_axolotls_pretraining_data(place):
    entry = {"path": "o/n", "type": "pretrain", "text_column": "t"}
    changes = {"datasets": None, "pretraining_dataset": [entry]}
    data = converted(place, "axolotl.yml", changes)[0].data
    assert (data.format, data.columns) == ("text", {"text": "t"})


def test_the_older_name_of_neftune(place):
    config = converted(place, "axolotl.yml", {"noisy_embedding_alpha": 5})[0]
    assert config.train.neftune_noise_alpha == 5


def test_more_of_axolotl(place):
    config, conversion = converted(
        place,
        "axolotl.yml",
        {
            "datasets": [
                {"path": "a.jsonl", "type": "alpaca"},
                {"path": "b.jsonl", "type": "chat_template", "field_messages": "turns"},
                {"path": "o/n", "name": "main", "split": "test", "type": {"field_output": "o"}},
            ],
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
    sources = [(Path(s.path).name, s.format, s.columns) for s in config.data.sources]
    assert sources == [
        ("a.jsonl", "instruction/output", {}),
        ("b.jsonl", "messages", {"messages": "turns"}),
        ("test", "instruction/output", {"output": "o"}),
    ]
    assert config.data.sources[2].path == "o/n:main/test"
    reasons = {left.key: left.reason for left in conversion.dropped}
    assert "datasets[2].type: {field_output}" in reasons
    assert "supported: constant" in reasons["lr_scheduler: one_cycle"]


@pytest.mark.parametrize(
    ("changes", "name", "kwargs", "dropped"),
    [
        ({"lr_scheduler": "cosine", "cosine_min_lr_ratio": 0.1}, "cosine_with_min_lr",
         {"min_lr_rate": 0.1}, ""),
        ({"lr_scheduler": "linear", "cosine_min_lr_ratio": 0.1}, "linear", {},
         "cosine_min_lr_ratio: 0.1"),
        ({"lr_scheduler": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 9}},
         "warmup_stable_decay", {"num_decay_steps": 9}, ""),
        ({"lr_scheduler": "warmup_stable_decay"}, "cosine", {},
         "lr_scheduler: warmup_stable_decay"),
        ({"lr_scheduler": "cosine_with_restarts", "lr_scheduler_kwargs": {"cycles": 9}},
         "cosine_with_restarts", {}, "lr_scheduler_kwargs: {cycles}"),
        ({"lr_scheduler": "polynomial", "lr_scheduler_kwargs": {"lr_end": 1e-6, "power": 2}},
         "polynomial", {"lr_end": 1e-6, "power": 2}, ""),
        ({"lr_scheduler": "reduce_lr_on_plateau"}, "reduce_lr_on_plateau", {}, ""),
    ],
)  # fmt: skip
def test_axolotls_schedules(place, changes, name, kwargs, dropped):
    config, conversion = converted(place, "axolotl.yml", {"val_set_size": 0.1, **changes})
    optim = config.optim
    assert (optim.lr_scheduler_type, optim.lr_scheduler_kwargs) == (name, kwargs)
    keys = [left.key for left in conversion.dropped if "lr" in left.key]
    assert keys == ([dropped] if dropped else [])


def test_several_files_of_axolotls_data_are_several_sources(place):
    entry = {"path": "json", "data_files": ["a.json", "b.json"], "type": "alpaca"}
    data = converted(place, "axolotl.yml", {"datasets": [entry]})[0].data
    assert [Path(source.path).name for source in data.sources] == ["a.json", "b.json"]
    assert {source.format for source in data.sources} == {"instruction/output"}


@pytest.mark.parametrize(
    ("changes", "plain", "special"),
    [
        ({"tokens": ["<a>", "<b>"]}, ["<a>", "<b>"], []),
        ({"special_tokens": {"eos_token": "<|im_end|>", "pad_token": "<pad>"},
          "tokens": ["<|im_start|>", "<|im_end|>"]}, ["<|im_start|>"], ["<|im_end|>"]),
        ({"special_tokens": {"bos_token": "<s>", "eos_token": "</s>",
                             "additional_special_tokens": ["<x>", "</s>"]}}, [],
         ["<s>", "</s>", "<x>"]),
        ({"special_tokens": {"pad_token": "<pad>"}}, [], []),
        ({"special_tokens": ["<x>"]}, [], []),
    ],
)  # fmt: skip
def test_new_tokens_of_axolotl(place, changes, plain, special):
    config, conversion = converted(place, "axolotl.yml", {"special_tokens": {}, **changes})
    assert (config.model.add_tokens, config.model.add_special_tokens) == (plain, special)
    has_note = "BOS and EOS remain" in conversion.text()
    assert has_note == ("eos_token" in changes.get("special_tokens", {}))
    left = reasons_of(conversion)
    assert any("pad_token" in key for key in left) == ("<pad>" in str(changes))
    is_list = isinstance(changes.get("special_tokens"), list)
    assert ("must be a mapping such as {eos_token: ...}" in left.values()) == is_list


@pytest.mark.parametrize(("entry", "columns"), [
    ({"type": "sharegpt"}, {"conversations": "conversations"}),
    ({"type": "chat_template"}, {"messages": "messages"}),
    ({"type": "sharegpt", "field_messages": "talk"}, {"conversations": "talk"}),
    ({"type": "chat_template", "field": "talk"}, {"messages": "talk"}),
])  # fmt: skip
def test_chats_lie_where_they_are_said_to_or_where_they_do_by_default(place, entry, columns):
    data = converted(place, "axolotl.yml", {"datasets": [{"path": "o/n", **entry}]})[0].data
    (name,) = columns
    kept = {} if columns[name] == name else columns
    assert (data.format, data.columns) == (name, kept)
