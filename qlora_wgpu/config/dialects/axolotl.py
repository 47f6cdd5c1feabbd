"""Axolotl's YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qlora_wgpu.config.dialects import preferences, trl
from qlora_wgpu.config.dialects.draft import (
    NO_FULL_FINE_TUNING,
    ONE_TRUNCATION,
    Defaults,
    Dialect,
    Draft,
    RowSpec,
    Source,
    listed,
    listed_tokens,
)

_MARKS = (
    "base_model sequence_len micro_batch_size num_epochs sample_packing val_set_size "
    "datasets lora_target_linear train_on_inputs lr_scheduler dataset_prepared_path"
)
_KEYS = (
    "base_model lora_r lora_alpha lora_dropout peft_use_rslora peft_use_dora "
    "peft_init_lora_weights peft_layers_to_transform lora_modules_to_save peft_ensure_weight_tying "
    "peft_trainable_token_indices loraplus_lr_ratio sequence_len sample_packing micro_batch_size "
    "gradient_accumulation_steps num_epochs max_steps neftune_noise_alpha noisy_embedding_alpha "
    "seed learning_rate weight_decay max_grad_norm adam_beta1 adam_beta2 adam_epsilon adam_eps "
    "early_stopping_patience load_best_model_at_end logging_steps output_dir save_total_limit"
)
_LONG_ROWS = {"truncate": "keep_start", "raise": "error", "drop": "drop"}
_ENTRY_KEYS = (
    "path name split type data_files ds_type field field_messages message_property_mappings "
    "message_field_role message_field_content chat_template chat_template_jinja "
    "trust_remote_code text_column field_chosen field_rejected"
)
"""Keys of a data set that are converted; all others are dropped with a reason."""
_ENTRY_DEFAULTS: dict[str, Any] = {
    "train_on_eos": "turn",
    "train_on_eot": "turn",
    "field_tools": "tools",
}
_ASSISTANT_ROLES = {"assistant", "gpt", "model"}
_TURN_MARKS = ("train", "training", "weight", "loss", "loss_weight")  # of data/conversations.py
_DEFAULTS: Defaults = {
    "lora": {"target_modules": trl.PEFT_TARGETS},
    "data": {"max_seq_length": 512, "truncation": "drop"},
    "train": {
        "num_train_epochs": 1.0,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": False,
        "seed": 42,
    },
    "output": {"save_total_limit": None},
}


def _convert(draft: Draft) -> None:
    objective = preferences.convert_axolotl(draft)
    if draft.take("process_reward_model"):
        raise draft.refuse(
            "process_reward_model", True,
            "is not supported: reward models score whole sequences (reward_model)",
        )  # fmt: skip
    adapter, four, eight = (draft.take(k) for k in ("adapter", "load_in_4bit", "load_in_8bit"))
    if adapter is None:
        draft.note(NO_FULL_FINE_TUNING)
    bits = 4 if four or adapter == "qlora" else 8 if eight else None
    origin = "load_in_4bit" if four else "load_in_8bit" if eight else "without load_in_4bit"
    trl.set_quantization(draft, bits, f"adapter: {adapter or 'none'}, {origin}")
    _convert_targets(draft)
    _convert_tokens(draft)
    _convert_data(draft, objective)
    preferences.settle_rows(draft, objective)
    _convert_evaluation(draft)
    _convert_loop(draft)


def _convert_targets(draft: Draft) -> None:
    linear, modules = draft.take("lora_target_linear"), draft.take("lora_target_modules")
    if linear or modules in ("all-linear", ["all-linear"]):
        draft.set("lora.target_modules", "all-linear", "lora_target_linear")
    elif modules:
        draft.set("lora.target_modules", modules, "lora_target_modules")
    draft.convert({"lora_model_dir": ("lora.init_from", draft.resolve)})


def _convert_tokens(draft: Draft) -> None:
    given = draft.take("special_tokens", {})
    if not isinstance(given, Mapping):
        draft.drop("special_tokens", given, "must be a mapping such as {eos_token: ...}")
        given = {}
    more = given.get("additional_special_tokens") or []
    named = [str(given[k]) for k in ("bos_token", "eos_token", "unk_token") if given.get(k)]
    special = list(dict.fromkeys([*named, *listed_tokens(more)]))
    draft.set_tokens(
        ("tokens", listed_tokens(draft.take("tokens", []))),
        ("special_tokens, if the tokenizer lacks them", special),
    )
    if named:
        draft.note("special_tokens: BOS and EOS remain those of the tokenizer and chat template")
    if (padding := given.get("pad_token")) is not None:
        draft.drop("special_tokens.pad_token", padding, "padding is always masked")


def _convert_data(draft: Draft, objective: str) -> None:
    datasets = draft.take("datasets", draft.take("pretraining_dataset", []))
    datasets = [entry for entry in listed(datasets) if isinstance(entry, Mapping)]
    sources = [
        Source(path, _rows(draft, entry, number, objective))
        for number, entry in enumerate(datasets)
        for path in _paths(draft, entry)
    ]
    if sources:
        draft.set_sources(sources, "datasets")
    draft.set_chat_template(draft.take("chat_template"), "chat_template", "tokenizer_default")
    draft.set_chat_template(draft.take("chat_template_jinja"), "chat_template_jinja")
    if draft.take("train_on_inputs"):
        draft.set("data.train_on", "all", "train_on_inputs")
    draft.convert({"excess_length_strategy": ("data.truncation", _LONG_ROWS.get)})
    formats = [source.rows.format for source in sources]
    if set(formats) == {"text"}:
        draft.set("data.truncation", "windows", "completion splits long text")
    elif "text" in formats:
        draft.note(f"completion splits long text; {ONE_TRUNCATION}")


def _paths(draft: Draft, entry: Mapping[str, Any]) -> list[str]:
    files, path = listed(entry.get("data_files") or []), str(entry.get("path") or "")
    if files and (path in ("json", "csv", "parquet", "text") or not path):
        return draft.file_paths(files, entry.get("split"), "datasets")
    if files:
        draft.note(f"data_files of {path} are ignored: set the split or the folder")
    return draft.dataset_paths(path, entry.get("name"), entry.get("split"))


def _rows(draft: Draft, entry: Mapping[str, Any], number: int, objective: str) -> RowSpec:
    """The rows of a ``type``, which may be a custom prompt."""
    kind, key = entry.get("type"), f"datasets[{number}].type"
    _drop_others(draft, entry, number)
    if objective != "sft":
        return preferences.rows_of_axolotl(draft, entry, key)
    if isinstance(kind, Mapping):
        columns = {key: kind.get(f"field_{key}") for key in ("instruction", "input", "output")}
        draft.drop(key, kind, "custom prompts are not supported: Alpaca's is used")
        return RowSpec.named("instruction/output", columns, key)
    name = str(kind or "").partition(":")[0]
    origin = f"type: {kind}"
    if name.startswith(("chat_template", "sharegpt")):
        return _chats(draft, entry, number, name, origin)
    if name in ("alpaca", "alpaca_w_system.load", "alpaca_instruct"):
        if origin != f"type: {name}":
            draft.drop(key, kind, "Alpaca's original prompt is used")
        return RowSpec.named("instruction/output", {}, origin)
    if name in ("completion", "pretrain"):
        column = entry.get("field") or entry.get("text_column")
        return RowSpec.named("text", {"text": column}, origin)
    if name in ("alpaca_chat.load_qa", "context_qa", "oasst"):
        draft.drop(key, kind, "its prompt is not used; for chat turns, set "
                   "data.apply_chat_template: true")  # fmt: skip
        return RowSpec.named(None, {"prompt": "question", "completion": "answer"}, origin)
    if kind is not None:
        draft.drop(key, kind, "the format is detected from the rows' keys")
    return RowSpec()


def _chats(draft: Draft, entry: Mapping[str, Any], number: int, name: str, origin: str) -> RowSpec:
    mappings = entry.get("message_property_mappings") or {}
    role = mappings.get("role") or entry.get("message_field_role")
    by_type = "conversations" if name.startswith("sharegpt") else "messages"
    row_format = "conversations" if role == "from" else by_type
    field = entry.get("field_messages") or entry.get("field") or by_type
    if role not in (None, "from", "role"):
        reason = "rename the keys to role and content, or from and value"
        draft.drop("message_property_mappings", mappings, reason)
    if entry.get("chat_template") is not None:
        key, template = f"datasets[{number}].chat_template", entry["chat_template"]
        if template == "jinja" and entry.get("chat_template_jinja"):
            template = entry["chat_template_jinja"]
        draft.set_chat_template(template, key, "tokenizer_default")
    return RowSpec.named(row_format, {row_format: field}, origin)


_ENTRY_REASONS = {
    "roles_to_train": (
        "the loss is taken on the assistant's turns and turns with train: true, or on all with "
        "data.train_on: all"
    ),
    "message_field_training_detail": "the loss is taken on whole turns",
    "message_field_training": "rename it to train, training or weight",
    "train_on_": "the loss is taken on the assistant's turns with their end tokens",
    "shards": "use rows in data.sources for a part of the rows",
    "": "not supported by data.format",
}
"""By the beginning of a key, the first of which counts."""


def _drop_others(draft: Draft, entry: Mapping[str, Any], number: int) -> None:
    """Drops the keys of a data set apart from its path and format."""
    for key, value in entry.items():
        if key in _ENTRY_KEYS.split() or value in (None, False, _ENTRY_DEFAULTS.get(key)):
            continue
        if key == "roles_to_train" and value and set(value) <= _ASSISTANT_ROLES:
            continue
        if key == "message_field_training" and value in _TURN_MARKS:
            continue
        reason = next(why for start, why in _ENTRY_REASONS.items() if key.startswith(start))
        draft.drop(f"datasets[{number}].{key}", value, reason)


def _convert_evaluation(draft: Draft) -> None:
    size, tests = draft.take("val_set_size", 0), draft.take("test_datasets")
    if tests and isinstance(listed(tests)[0], Mapping):
        paths = [path for entry in listed(tests) for path in _paths(draft, entry)]
        draft.set_eval(paths, "test_datasets")
    elif size:
        draft.set("data.eval_split", size if size < 1 else int(size), "val_set_size")
    steps, per_epoch = draft.take("eval_steps"), draft.take("evals_per_epoch")
    draft.take("eval_strategy", draft.take("evaluation_strategy"))
    if not (tests or size):
        if steps or per_epoch:
            draft.drop("eval_steps", steps or per_epoch, trl.NO_EVAL_DATA)
        return
    if per_epoch:
        epochs = draft.remaining.get("num_epochs") or 1
        draft.set("eval.eval_steps", trl.fraction_of_run(per_epoch, epochs), "evals_per_epoch")
    elif steps:
        draft.set("eval.eval_steps", steps, "eval_steps")


def _convert_loop(draft: Draft) -> None:
    if draft.remaining.get("warmup_steps") is None and draft.remaining.get("warmup_ratio") is None:
        draft.set("optim.warmup_ratio", 0.03, "Axolotl's default")
    min_ratio = draft.take("cosine_min_lr_ratio")
    if min_ratio is not None and draft.remaining.get("lr_scheduler") in (None, "cosine"):
        draft.remaining["lr_scheduler"] = "cosine_with_min_lr"
        draft.remaining["lr_scheduler_kwargs"] = {"min_lr_rate": min_ratio}
    elif min_ratio is not None:
        draft.drop("cosine_min_lr_ratio", min_ratio, "lr_scheduler is not cosine")
    trl.convert_schedule(draft, "lr_scheduler")
    trl.convert_precision(draft)
    trl.convert_optimizer(draft, "optimizer")
    trl.convert_best(draft)
    draft.convert({"gradient_checkpointing": ("train.gradient_checkpointing", bool)})
    total, micro = draft.take("batch_size"), draft.remaining.get("micro_batch_size")
    if total and micro:
        draft.set("train.gradient_accumulation_steps", max(total // micro, 1), "batch_size")
    steps = draft.take("save_steps")
    if isinstance(steps, int):
        draft.set("output.save_steps", steps, "save_steps")
    elif steps is not None:
        draft.drop("save_steps", steps, trl.INTEGER_STEPS)
    names = [n for n, key in (("wandb", "wandb_project"), ("tensorboard", "use_tensorboard"))
             if draft.take(key)]  # fmt: skip
    if names:
        draft.set("log.report_to", names, "wandb_project, use_tensorboard")


DIALECT = Dialect("Axolotl", _MARKS, _KEYS, _convert, _DEFAULTS)
