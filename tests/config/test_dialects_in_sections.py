"""torchtune's files and Unsloth Studio's, with their keys in sections."""

import pytest
from support.dialects import converted, reasons_of

from qlora_wgpu.errors import ConfigError

ALPACA = {"_component_": "torchtune.datasets.alpaca_dataset"}


def test_torchtune(place):
    config, conversion = converted(place, "torchtune.yaml")
    data, optim, train = config.data, config.optim, config.train
    assert config.model.path == "models/llama" and config.quant.scheme == "nf4"
    assert (config.lora.r, config.lora.lora_alpha, config.lora.lora_dropout) == (64, 128, 0.1)
    assert config.lora.target_modules == [
        "q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    ]  # fmt: skip
    assert data.train == str(place / "data/mine.json[:95%]")
    assert data.columns == {"prompt": "question", "completion": "answer"}
    assert data.apply_chat_template and data.packing and data.train_on == "auto"
    assert (optim.learning_rate, optim.adam_beta2, optim.weight_decay) == (3e-4, 0.95, 0.01)
    assert (optim.lr_scheduler_type, optim.warmup_steps, optim.max_grad_norm) == ("cosine", 100, 1)
    assert (train.max_steps, train.per_device_train_batch_size, train.seed) == (60, 4, 7)
    assert (train.compute_dtype, train.gradient_checkpointing) == ("float32", True)
    assert (config.log.report_to, config.log.logging_steps) == (["wandb"], 5)
    assert any("max_steps_per_epoch" in note for note in conversion.notes)


def test_what_torchtune_does_where_its_file_says_nothing(place):
    changes = dict.fromkeys(
        ("clip_grad_norm", "lr_scheduler", "gradient_accumulation_steps", "max_steps_per_epoch",
         "enable_activation_checkpointing"), "LEAVE OUT",
    )  # fmt: skip
    config, _ = converted(place, "torchtune.yaml", {**changes, "optimizer": {}})
    optim = config.optim
    assert (optim.max_grad_norm, optim.lr_scheduler_type, optim.warmup_ratio) == (0, "constant", 0)
    assert (optim.learning_rate, config.train.max_steps) == (1e-3, -1)
    assert config.train.gradient_accumulation_steps == 1
    assert not config.train.gradient_checkpointing


@pytest.mark.parametrize(
    ("dataset", "row_format", "train", "train_on"),
    [
        (ALPACA, "instruction/output", "tatsu-lab/alpaca", "all"),
        ({**ALPACA, "train_on_input": False}, "instruction/output", "tatsu-lab/alpaca", "auto"),
        (
            {"_component_": "torchtune.datasets.chat_dataset", "source": "o/n", "split": "test",
             "conversation_column": "turns", "conversation_style": "sharegpt"},
            "conversations", "o/n:test", "auto",
        ),
        *(
            ({"_component_": "torchtune.datasets.chat_dataset", "source": "o/n",
              "conversation_style": "openai", **masked}, "messages", "o/n", train_on)
            for masked, train_on in (
                ({"masking_strategy": "train_on_last"}, "last_turn"),
                ({"masking_strategy": "train_on_assistant"}, "assistant"),
                ({"masking_strategy": "train_on_all"}, "all"),
                ({"masking_strategy": "train_on_all", "train_on_input": False}, "auto"),
            )
        ),
        (
            {"_component_": "torchtune.datasets.text_completion_dataset", "source": "text",
             "data_files": "a.txt", "column": "body"},
            "text", "a.txt", "auto",
        ),
    ],
)  # fmt: skip
def test_torchtunes_data_sets(place, dataset, row_format, train, train_on):
    (place / "a.txt").write_text("a")
    data = converted(place, "torchtune.yaml", {"dataset": dataset})[0].data
    assert (data.format, data.train_on) == (row_format, train_on)
    assert data.train in (train, str(place / train)) and not data.apply_chat_template


def test_what_torchtune_learns_that_is_not_known_is_refused(place):
    dataset = {**ALPACA, "masking_strategy": "train_on_some"}
    with pytest.raises(
        ConfigError, match="masking_strategy: train_on_some must be one of train_on_all"
    ):
        converted(place, "torchtune.yaml", {"dataset": dataset})
    two = [{**ALPACA, "masking_strategy": "train_on_last"}, ALPACA]
    config, conversion = converted(place, "torchtune.yaml", {"dataset": two})
    assert config.data.train_on == "auto"
    assert "masking_strategy: all, last_turn" in reasons_of(conversion)


def test_torchtunes_preferences(place):
    changes = {
        "loss": {"_component_": "torchtune.rlhf.loss.DPOLoss", "beta": 0.2},
        "dataset": {"_component_": "torchtune.datasets.preference_dataset", "source": "o/n"},
    }
    config, _ = converted(place, "torchtune.yaml", changes)
    assert (config.train.objective, config.train.beta, config.data.train) == ("dpo", 0.2, "o/n")


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": {"_component_": "torchtune.rlhf.loss.PPOLoss"}},
        {"teacher_model": {"_component_": "torchtune.models.llama3.llama3_8b"}},
        {"dataset": {"_component_": "torchtune.datasets.multimodal.the_cauldron_dataset"}},
        {"dataset": {"_component_": "torchtune.datasets.chat_dataset"}},
    ],
)
def test_what_torchtune_trains_otherwise_is_refused(place, changes):
    with pytest.raises(ConfigError, match=r"theirs.json cannot be converted: "):
        converted(place, "torchtune.yaml", changes)


def test_unsloth(place):
    config, conversion = converted(place, "unsloth.yaml")
    data, optim, train = config.data, config.optim, config.train
    assert (config.model.path, config.quant.scheme) == ("owner/base", "nf4")
    assert (config.lora.r, config.lora.lora_alpha) == (32, 16)
    assert config.lora.target_modules == ["q_proj", "v_proj"]
    assert (data.format, data.train_on, data.packing) == ("auto", "assistant", True)
    assert data.apply_chat_template
    assert (train.max_steps, train.num_train_epochs, train.seed) == (-1, 2, 3407)
    assert (train.per_device_train_batch_size, train.gradient_accumulation_steps) == (2, 4)
    assert not train.gradient_checkpointing
    assert (optim.name, optim.lr_scheduler_type, optim.warmup_steps) == ("adamw_8bit", "linear", 0)
    assert (optim.warmup_ratio, optim.weight_decay) == (0, 0.01)
    assert (config.output.dir, config.output.save_steps) == ("out", 20)
    assert config.log.report_to == ["wandb"] and config.output.save_total_limit is None
    assert "wandb_project: mine" in reasons_of(conversion)


@pytest.mark.parametrize(("kind", "fmt"), [("auto", "auto"), ("alpaca", "auto"), ("raw", "text")])
def test_formats_of_unsloth_that_are_no_chats(place, kind, fmt):
    given = {"dataset": "o/n", "format_type": kind, "train_split": "train[:10%]"}
    data = converted(place, "unsloth.yaml", {"data": given})[0].data
    assert (data.train, data.format, data.apply_chat_template) == ("o/n[:10%]", fmt, False)


def test_what_unsloths_notebooks_call_learning_answers(place):
    changes = {"training": {"train_on_responses_only": True, "instruction_part": "<user>"}}
    config, conversion = converted(place, "unsloth.yaml", changes)
    assert config.data.train_on == "assistant"
    assert "use data.train_on" in reasons_of(conversion)["instruction_part: <user>"]


def test_what_unsloth_does_where_its_file_says_nothing(place):
    changes = {"training": {"num_epochs": 0, "max_steps": 30}, "lora": {}, "logging": {}}
    config, _ = converted(place, "unsloth.yaml", changes)
    assert (config.lora.r, config.data.max_seq_length, config.data.train_on) == (64, 2048, "all")
    assert (config.train.max_steps, config.optim.learning_rate) == (30, 2e-4)
    assert (config.optim.warmup_steps, config.quant.scheme) == (5, "nf4")
    assert config.train.gradient_checkpointing
