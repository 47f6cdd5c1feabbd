"""torchtune's YAML, with components that name their builder (``_component_``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qlora_wgpu.config.dialects import preferences, trl
from qlora_wgpu.config.dialects.draft import (
    NO_FULL_FINE_TUNING,
    Defaults,
    Dialect,
    Draft,
    RowSpec,
    Source,
    listed,
    mapping_of,
)

_MARKS = (
    "tokenizer checkpointer dataset optimizer lr_scheduler loss epochs max_steps_per_epoch "
    "metric_logger clip_grad_norm enable_activation_checkpointing log_every_n_steps compile "
    "profiler shuffle model._component_ dataset._component_ tokenizer._component_"
)
_KEYS = (
    "epochs batch_size gradient_accumulation_steps enable_activation_checkpointing seed "
    "log_every_n_steps output_dir"
)
_DEFAULTS: Defaults = {
    "lora": {"r": 8, "lora_alpha": 16},
    "train": {"gradient_accumulation_steps": 1, "gradient_checkpointing": False},
    "optim": {
        "learning_rate": 1e-3,
        "weight_decay": 0.01,
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant",
        "warmup_ratio": 0.0,
    },
    "output": {"save_total_limit": None},
}
_MAX_LENGTH = 2048  # torchtune has no limit by default
_LORA = {"lora_rank": "lora.r", "lora_alpha": "lora.lora_alpha",
         "lora_dropout": "lora.lora_dropout", "use_dora": "lora.use_dora"}  # fmt: skip
_RATES = {"lr": "optim.learning_rate", "weight_decay": "optim.weight_decay",
          "eps": "optim.adam_epsilon"}  # fmt: skip
_FILES = ("json", "csv", "parquet", "text")  # sources whose data_files are set
_ALPACA = {"alpaca_dataset": "tatsu-lab/alpaca", "alpaca_cleaned_dataset": "yahma/alpaca-cleaned"}
_NOT_NEEDED = {
    "device": "use device.gpu",
    "profiler": "`qlora-wgpu bench` measures a step",
    "compile": "this program's own fused kernels are always used",
    "log_peak_memory_stats": "peak memory is always logged",
    "low_cpu_ram": "weights are read one at a time",
    "save_adapter_weights_only": "checkpoints contain everything needed to resume",
    "enable_activation_offloading": "what does not fit on the device is offloaded automatically",
}
_PAIRS = ("preference_dataset", "stack_exchange_paired_dataset", "hh_rlhf_helpful_dataset")
_SCHEDULES = {
    "get_cosine_schedule_with_warmup": "cosine",
    "get_linear_schedule_with_warmup": "linear",
    "get_constant_schedule": "constant",
}
_DATASET_KEYS = (
    "_component_ source split data_files subset name column_map train_on_input masking_strategy "
    "packed column conversation_column conversation_style"
)
_TRAIN_ON = {"train_on_all": "all", "train_on_assistant": "assistant", "train_on_last": "last_turn"}
"""data.train_on by ``masking_strategy``."""


def _convert(draft: Draft) -> None:
    model, arguments = _component(draft, "model")
    if "lora" not in model:
        draft.note(NO_FULL_FINE_TUNING)
    four = model.startswith("qlora") or bool(arguments.pop("quantize_base", False))
    trl.set_quantization(draft, 4 if four else None, f"model: {model or 'none'}")
    _convert_lora(draft, arguments)
    _, files = _component(draft, "checkpointer")
    draft.convert({"checkpoint_dir": ("model.path", draft.resolve)}, files, "checkpointer.")
    _, tokenizer = _component(draft, "tokenizer")
    if (length := tokenizer.get("max_seq_len")) is not None:
        draft.set("data.max_seq_length", length, "tokenizer.max_seq_len")
    else:
        draft.set("data.max_seq_length", _MAX_LENGTH, "tokenizer.max_seq_len: null has no limit")
    _convert_objective(draft)
    _convert_data(draft)
    _convert_loop(draft)


def _component(draft: Draft, key: str) -> tuple[str, dict[str, Any]]:
    """The builder of a component, without its module, and the arguments."""
    arguments = dict(mapping_of(draft.take(key)))
    return str(arguments.pop("_component_", "")).rpartition(".")[2], arguments


def _convert_lora(draft: Draft, arguments: dict[str, Any]) -> None:
    modules = arguments.pop("lora_attn_modules", ["q_proj", "v_proj"])
    names = ["o_proj" if name == "output_proj" else str(name) for name in modules]
    if arguments.pop("apply_lora_to_mlp", False):
        names += ["gate_proj", "up_proj", "down_proj"]
    if arguments.pop("apply_lora_to_output", False):
        names.append("lm_head")
    draft.set("lora.target_modules", names, "lora_attn_modules, apply_lora_to_mlp and _output")
    draft.convert(_LORA, arguments, "model.")
    for key, value in arguments.items():
        if key not in _LORA:
            draft.drop(f"model.{key}", value, "config.json contains it")


def _convert_objective(draft: Draft) -> None:
    name, arguments = _component(draft, "loss")
    if name == "DPOLoss":
        draft.set("train.objective", "dpo", "loss: DPOLoss")
        draft.set("train.beta", arguments.get("beta", 0.1), "loss.beta")
        if smoothing := arguments.get("label_smoothing"):
            draft.drop("loss.label_smoothing", smoothing, preferences.ONLY_ROBUST)
    elif name and "CrossEntropy" not in name and not name.startswith(("CE", "LinearCE")):
        raise draft.refuse("loss", name, preferences.OTHER_LOSS)
    for key in ("kd_loss", "kd_ratio", "teacher_model"):
        if (value := draft.take(key)) is not None:
            raise draft.refuse(key, value, "is not supported: distillation")


def _convert_data(draft: Draft) -> None:
    entries = listed(draft.take("dataset", []))
    sources, train_on = [], set()
    for number, entry in enumerate(e for e in entries if isinstance(e, Mapping)):
        key = f"dataset[{number}]" if len(entries) > 1 else "dataset"
        name = str(entry.get("_component_", "")).rpartition(".")[2]
        rows, default = _rows(draft, entry, key, name)
        train_on.add(_train_on(draft, entry, key, default))
        sources += [Source(path, rows) for path in _paths(draft, entry, key, name)]
        for other, value in entry.items():
            if other not in _DATASET_KEYS.split() and value not in (None, False, {}):
                draft.drop(f"{key}.{other}", value, "not supported by data.format")
        if entry.get("packed"):
            draft.set("data.packing", True, f"{key}.packed")
    if sources:
        draft.set_sources(sources, "dataset")
    if len(train_on) > 1:
        reason = "data.train_on is the same for all sources: the loss is taken on the answers"
        draft.drop("masking_strategy", ", ".join(sorted(train_on)), reason)
    elif train_on and (only := train_on.pop()) != "auto":
        draft.set("data.train_on", only, "masking_strategy, or train_on_input")


def _train_on(draft: Draft, entry: Mapping[str, Any], key: str, default: str) -> str:
    if (given := entry.get("train_on_input")) is not None:  # the old key wins
        return "all" if given else "auto"
    strategy = entry.get("masking_strategy")
    if strategy is None:
        return default
    if strategy not in _TRAIN_ON:
        expected = ", ".join(_TRAIN_ON)
        raise draft.refuse(f"{key}.masking_strategy", strategy, f"must be one of {expected}")
    return _TRAIN_ON[strategy]


def _rows(draft: Draft, entry: Mapping[str, Any], key: str, name: str) -> tuple[RowSpec, str]:
    """The rows of a data set, and its default of data.train_on."""
    columns = mapping_of(entry.get("column_map"))
    if name in _ALPACA:
        draft.note(
            "torchtune puts Alpaca's prompt into a chat turn; here it is plain text, or set "
            "data.apply_chat_template: true for chat turns without the prompt"
        )
        return RowSpec.named("instruction/output", columns, name), "all"
    if name == "instruct_dataset":
        prompt, completion = columns.get("input", "input"), columns.get("output", "output")
        pair = {"prompt": prompt, "completion": completion}
        draft.set("data.apply_chat_template", True, name)
        return RowSpec.named("prompt/completion", pair, name), "auto"
    if name == "chat_dataset":
        is_openai = entry.get("conversation_style") == "openai"
        row_format = "messages" if is_openai else "conversations"
        column = entry.get("conversation_column")
        return RowSpec.named(row_format, {row_format: column}, name), "auto"
    if name == "text_completion_dataset":
        return RowSpec.named("text", {"text": entry.get("column")}, name), "auto"
    if name in _PAIRS:
        return RowSpec.named(None, columns, name), "auto"
    raise draft.refuse(f"{key}._component_", name, "is not supported: set the data with --data")


def _paths(draft: Draft, entry: Mapping[str, Any], key: str, name: str) -> list[str]:
    source, files = entry.get("source", _ALPACA.get(name)), entry.get("data_files")
    if files is not None and (source in _FILES or source is None):
        return draft.file_paths(listed(files), entry.get("split"), key)
    if source is None:
        raise draft.refuse(key, name, "has no source: set the data with --data")
    subset = entry.get("subset") or entry.get("name")
    return draft.dataset_paths(str(source), subset, entry.get("split"))


def _convert_loop(draft: Draft) -> None:
    name, arguments = _component(draft, "optimizer")
    draft.remaining["optimizer"] = "adamw_8bit" if "8bit" in name else name or None
    draft.convert(_RATES, arguments, "optimizer.")
    trl.set_betas(draft, arguments, "optimizer.betas")
    trl.convert_optimizer(draft, "optimizer")
    schedule, arguments = _component(draft, "lr_scheduler")
    if schedule:
        draft.remaining["lr_scheduler"] = _SCHEDULES.get(schedule, schedule)
        draft.remaining["warmup_steps"] = arguments.get("num_warmup_steps")
        trl.convert_schedule(draft, "lr_scheduler")
    clip = draft.take("clip_grad_norm")
    if clip is not None and str(clip) != "inf":
        draft.set("optim.max_grad_norm", clip, "clip_grad_norm")
    if (steps := draft.take("max_steps_per_epoch")) is not None:
        epochs = draft.remaining.get("epochs") or 1
        draft.set("train.max_steps", int(steps * epochs), "max_steps_per_epoch times epochs")
        draft.note("max_steps_per_epoch ends longer epochs early; train.max_steps counts "
                           "all steps, over as many epochs as needed")  # fmt: skip
    if draft.take("dtype", "bf16") in ("fp32", "float32"):
        draft.set("train.compute_dtype", "float32", "dtype")
    if draft.take("shuffle", True) is False:
        draft.drop("shuffle", False, "every epoch shuffles all rows")
    logger, _ = _component(draft, "metric_logger")
    services = {"WandBLogger": "wandb", "TensorBoardLogger": "tensorboard"}
    if logger in services:
        draft.set("log.report_to", [services[logger]], f"metric_logger: {logger}")
    draft.note("torchtune saves after every epoch; here after output.save_steps steps")
    draft.convert(_NOT_NEEDED)


DIALECT = Dialect("torchtune", _MARKS, _KEYS, _convert, _DEFAULTS)
