"""The YAML of Unsloth Studio's ``unsloth train``, with its keys in sections."""

from __future__ import annotations

from qlora_wgpu.config.dialects import trl
from qlora_wgpu.config.dialects.draft import (
    NO_FULL_FINE_TUNING,
    Defaults,
    Dialect,
    Draft,
    RowSpec,
    Source,
    listed,
    mapping_of,
    words_of,
)

_MARKS = (
    "training logging training.training_type training.num_epochs training.random_seed "
    "training.train_on_completions training.max_seq_length training.save_steps "
    "data.format_type data.local_dataset lora.use_loftq lora.finetune_mlp_modules "
    "lora.vision_all_linear logging.enable_wandb logging.enable_tensorboard"
)
_SECTIONS = ("data", "training", "lora", "logging")
_KEYS = (
    "model lora_r lora_alpha lora_dropout use_rslora use_dora max_seq_length packing batch_size "
    "gradient_accumulation_steps num_epochs max_steps random_seed learning_rate weight_decay "
    "output_dir"
)
_ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_ATTENTION, _MLP = _ALL_LINEAR[:4], _ALL_LINEAR[4:]
_DEFAULTS: Defaults = {
    "lora": {"r": 64, "lora_alpha": 16},
    "data": {"max_seq_length": 2048},
    "train": {
        "num_train_epochs": 3.0,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "seed": 3407,
    },
    "optim": {
        "name": "adamw_8bit",
        "learning_rate": 2e-4,
        "lr_scheduler_type": "linear",
        "warmup_steps": 5,
        "weight_decay": 0.01,
    },
    "output": {"dir": "outputs", "save_total_limit": None},
}
_CHATS = ("sharegpt", "chatml", "conversational")  # instructions become chat turns


def _convert(draft: Draft) -> None:
    for section in _SECTIONS:
        draft.remaining.update(mapping_of(draft.take(section)))
    if draft.take("training_type", "lora") != "lora":
        draft.note(NO_FULL_FINE_TUNING)
    four = draft.take("load_in_4bit", True)
    trl.set_quantization(draft, 4 if four else None, f"load_in_4bit: {bool(four)}")
    _convert_targets(draft)
    _convert_data(draft)
    checkpointing = str(draft.take("gradient_checkpointing", "unsloth")).lower()
    recomputes = checkpointing not in ("none", "false", "0", "no", "off")
    draft.set(
        "train.gradient_checkpointing", recomputes, f"gradient_checkpointing: {checkpointing}"
    )
    if draft.remaining.get("num_epochs") == 0:
        draft.drop_key("num_epochs", "max_steps is used")
    trl.convert_schedule(draft, "lr_scheduler_type")
    if "optim.warmup_ratio" in draft.settings:  # instead of the default
        draft.set("optim.warmup_steps", 0, "warmup_steps: 0, or warmup_ratio")
    trl.convert_optimizer(draft, "optim")
    if steps := draft.take("save_steps", 0):
        draft.set("output.save_steps", steps, "save_steps")
    else:
        draft.note("Unsloth saves only at the end by default; here output.save_steps saves "
                           "checkpoints during training")  # fmt: skip
    if frequency := draft.take("log_frequency", 0):
        draft.set("log.logging_steps", frequency, "log_frequency")
    names = [name for name in ("wandb", "tensorboard") if draft.take(f"enable_{name}")]
    if names:
        draft.set("log.report_to", names, ", ".join(f"enable_{name}" for name in names))
    draft.drop_key("tensorboard_dir", "it is in the run's folder")


def _convert_targets(draft: Draft) -> None:
    names = words_of(draft.take("target_modules", _ALL_LINEAR))
    for key, part in (("finetune_attention_modules", _ATTENTION), ("finetune_mlp_modules", _MLP)):
        if draft.take(key, True) is False:
            names = [name for name in names if name not in part]
    draft.set("lora.target_modules", names or _ALL_LINEAR, "target_modules")
    layers = ("vision_all_linear", "finetune_vision_layers", "finetune_language_layers")
    reason = "only the layers of the language model are trained, on text"
    draft.convert(dict.fromkeys(layers, reason))
    if draft.take("use_loftq"):
        draft.drop("use_loftq", True, "not supported (lora.init_lora_weights: pissa, olora)")


def _convert_data(draft: Draft) -> None:
    kind = str(draft.take("format_type", "auto")).lower()
    rows = RowSpec.named("text" if kind == "raw" else None, {}, f"format_type: {kind}")
    draft.set("data.apply_chat_template", kind in _CHATS, f"format_type: {kind}")
    files, name = draft.take("local_dataset", []), draft.take("dataset")
    subset, split = draft.take("subset"), draft.take("train_split", "train")
    paths = [draft.resolve(file) for file in listed(files)]
    if name is not None and not paths:
        paths = draft.dataset_paths(str(name), subset, split)
    if paths:
        draft.set_sources([Source(path, rows) for path in paths], "dataset")
    in_notebooks = draft.take("train_on_responses_only", False)
    only_answers = bool(draft.take("train_on_completions", in_notebooks))
    train_on = "assistant" if only_answers else "all"
    draft.set("data.train_on", train_on, f"train_on_completions: {str(only_answers).lower()}")


DIALECT = Dialect("Unsloth Studio", _MARKS, _KEYS, _convert, _DEFAULTS)
