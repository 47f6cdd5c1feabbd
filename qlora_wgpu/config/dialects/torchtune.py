"""torchtune's YAML, whose parts name what builds them (``_component_``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qlora_wgpu.config.dialects import trl
from qlora_wgpu.config.dialects.draft import Defaults, Dialect, Draft, RowsOf, Source, listed

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
_LENGTH = 2048  # of rows, where theirs are never cut
_LORA = {"lora_rank": "lora.r", "lora_alpha": "lora.lora_alpha",
         "lora_dropout": "lora.lora_dropout", "use_dora": "lora.use_dora"}  # fmt: skip
_RATES = {"lr": "optim.learning_rate", "weight_decay": "optim.weight_decay",
          "eps": "optim.adam_epsilon"}  # fmt: skip
_FILES = ("json", "csv", "parquet", "text")  # sources whose files are named apart
_USUAL = {"alpaca_dataset": "tatsu-lab/alpaca", "alpaca_cleaned_dataset": "yahma/alpaca-cleaned"}
_NOT_NEEDED = {
    "device": "device.gpu chooses among several GPUs",
    "profiler": "`qlora-wgpu bench` measures a step",
    "compile": "the kernels are this program's own, and always on",
    "log_peak_memory_stats": "the peak of memory is logged",
    "low_cpu_ram": "weights are read one by one",
    "save_adapter_weights_only": "checkpoints hold the adapter, and what a run needs to go on",
    "enable_activation_offloading": "what has no room on the device waits in host memory",
}
_PAIRS = ("preference_dataset", "stack_exchange_paired_dataset", "hh_rlhf_helpful_dataset")
_SHAPES = {
    "get_cosine_schedule_with_warmup": "cosine",
    "get_linear_schedule_with_warmup": "linear",
    "get_constant_schedule": "constant",
}
_KNOWN = (
    "_component_ source split data_files subset name column_map train_on_input masking_strategy "
    "packed column conversation_column conversation_style"
)
_LEARNT = {"train_on_all": "all", "train_on_assistant": "assistant", "train_on_last": "last_turn"}
"""What of a chat is learnt, by ``masking_strategy``."""


def _convert(draft: Draft) -> None:
    model, built = _part(draft, "model")
    if "lora" not in model:
        draft.notes.append("torchtune trains every weight here; a LoRA adapter is made")
    four = model.startswith("qlora") or bool(built.pop("quantize_base", False))
    trl.set_quantization(draft, 4 if four else None, f"model: {model or 'none'}")
    _convert_lora(draft, built)
    _, files = _part(draft, "checkpointer")
    base = {"checkpoint_dir": ("model.path", draft.place)}
    draft.convert(base, files, "checkpointer.")
    _, tokenizer = _part(draft, "tokenizer")
    if (length := tokenizer.get("max_seq_len")) is not None:
        draft.set("data.max_seq_length", length, "tokenizer.max_seq_len")
    else:
        draft.set("data.max_seq_length", _LENGTH, "tokenizer.max_seq_len: null never cuts a row")
    _convert_objective(draft)
    _convert_data(draft)
    _convert_loop(draft)


def _part(draft: Draft, key: str) -> tuple[str, dict[str, Any]]:
    """What builds a part, without its module, and the arguments."""
    given = draft.take(key, {})
    arguments = dict(given) if isinstance(given, Mapping) else {}
    return str(arguments.pop("_component_", "")).rpartition(".")[2], arguments


def _convert_lora(draft: Draft, built: dict[str, Any]) -> None:
    modules = built.pop("lora_attn_modules", ["q_proj", "v_proj"])
    names = ["o_proj" if name == "output_proj" else str(name) for name in modules]
    if built.pop("apply_lora_to_mlp", False):
        names += ["gate_proj", "up_proj", "down_proj"]
    if built.pop("apply_lora_to_output", False):
        names.append("lm_head")
    draft.set("lora.target_modules", names, "lora_attn_modules, apply_lora_to_mlp and _output")
    draft.convert(_LORA, built, "model.")
    for key, value in built.items():
        if key not in _LORA:
            draft.leave_out(f"model.{key}", value, "config.json says it")


def _convert_objective(draft: Draft) -> None:
    name, arguments = _part(draft, "loss")
    if name == "DPOLoss":
        draft.set("train.objective", "dpo", "loss: DPOLoss")
        draft.set("train.beta", arguments.get("beta", 0.1), "loss.beta")
        if smoothing := arguments.get("label_smoothing"):
            draft.leave_out("loss.label_smoothing", smoothing, "it changes TRL's losses robust and "
                            "exo_pair alone")  # fmt: skip
    elif name and "CrossEntropy" not in name and not name.startswith(("CE", "LinearCE")):
        raise draft.refuse("loss", name, "is another loss, which is not computed here")
    for key in ("kd_loss", "kd_ratio", "teacher_model"):
        if (value := draft.take(key)) is not None:
            raise draft.refuse(key, value, "distils a teacher, which is not done here")


def _convert_data(draft: Draft) -> None:
    entries = listed(draft.take("dataset", []))
    sources, learnt = [], set()
    for number, entry in enumerate(e for e in entries if isinstance(e, Mapping)):
        key = f"dataset[{number}]" if len(entries) > 1 else "dataset"
        name = str(entry.get("_component_", "")).rpartition(".")[2]
        rows, usual = _rows(draft, entry, key, name)
        learnt.add(_learnt(draft, entry, key, usual))
        sources += [Source(place, rows) for place in _places(draft, entry, key, name)]
        for other, value in entry.items():
            if other not in _KNOWN.split() and value not in (None, False, {}):
                draft.leave_out(f"{key}.{other}", value, "rows are read as their format says")
        if entry.get("packed"):
            draft.set("data.packing", True, f"{key}.packed")
    if sources:
        draft.set_sources(sources, "dataset")
    if len(learnt) > 1:
        draft.leave_out("masking_strategy", ", ".join(sorted(learnt)), "data.train_on is of all "
                        "sources: the answers are learnt")  # fmt: skip
    elif learnt and (train_on := learnt.pop()) != "auto":
        draft.set("data.train_on", train_on, "masking_strategy, or train_on_input")


def _learnt(draft: Draft, entry: Mapping[str, Any], key: str, usual: str) -> str:
    """What is learnt of a data set's rows."""
    if (given := entry.get("train_on_input")) is not None:  # older, and goes first
        return "all" if given else "auto"
    strategy = entry.get("masking_strategy")
    if strategy is None:
        return usual
    if strategy not in _LEARNT:
        raise draft.refuse(f"{key}.masking_strategy", strategy, f"is none of {', '.join(_LEARNT)}")
    return _LEARNT[strategy]


def _rows(draft: Draft, entry: Mapping[str, Any], key: str, name: str) -> tuple[RowsOf, str]:
    """How the rows of a data set are read, and what of them is learnt where nothing says it."""
    given = entry.get("column_map")
    columns = given if isinstance(given, Mapping) else {}
    if name in _USUAL:
        draft.notes.append(
            "torchtune puts Alpaca's prompt into a turn of the model's chat; here it stands by "
            "itself: data.apply_chat_template: true writes instructions as turns without it"
        )
        return RowsOf.named("instruction/output", columns, name), "all"
    if name == "instruct_dataset":
        pair = {
            "prompt": columns.get("input", "input"),
            "completion": columns.get("output", "output"),
        }
        draft.set("data.apply_chat_template", True, name)
        return RowsOf.named("prompt/completion", pair, name), "auto"
    if name == "chat_dataset":
        is_openai = entry.get("conversation_style") == "openai"
        row_format = "messages" if is_openai else "conversations"
        column = entry.get("conversation_column")
        return RowsOf.named(row_format, {row_format: column}, name), "auto"
    if name == "text_completion_dataset":
        return RowsOf.named("text", {"text": entry.get("column")}, name), "auto"
    if name in _PAIRS:
        return RowsOf.named(None, columns, name), "auto"
    raise draft.refuse(f"{key}._component_", name, "is a data set that is not known here: name its "
                       "data with --data")  # fmt: skip


def _places(draft: Draft, entry: Mapping[str, Any], key: str, name: str) -> list[str]:
    source, files = entry.get("source", _USUAL.get(name)), entry.get("data_files")
    if files is not None and (source in _FILES or source is None):
        return draft.file_places(listed(files), entry.get("split"), key)
    if source is None:
        raise draft.refuse(key, name, "names no source: name the data with --data")
    subset = entry.get("subset") or entry.get("name")
    return draft.hub_places(str(source), subset, entry.get("split"))


def _convert_loop(draft: Draft) -> None:
    name, arguments = _part(draft, "optimizer")
    draft.theirs["optimizer"] = "adamw_8bit" if "8bit" in name else name or None
    draft.convert(_RATES, arguments, "optimizer.")
    trl.set_betas(draft, arguments, "optimizer.betas")
    trl.convert_optimizer(draft, "optimizer")
    shape, schedule = _part(draft, "lr_scheduler")
    if shape:
        draft.theirs["lr_scheduler"] = _SHAPES.get(shape, shape)
        draft.theirs["warmup_steps"] = schedule.get("num_warmup_steps")
        trl.convert_schedule(draft, "lr_scheduler")
    clip = draft.take("clip_grad_norm")
    if clip is not None and str(clip) != "inf":
        draft.set("optim.max_grad_norm", clip, "clip_grad_norm")
    if (most := draft.take("max_steps_per_epoch")) is not None:
        epochs = draft.theirs.get("epochs") or 1
        draft.set("train.max_steps", int(most * epochs), "max_steps_per_epoch times epochs")
        draft.notes.append(
            "max_steps_per_epoch ends an epoch of more steps early; train.max_steps is the number "
            "of all steps, and shorter data is repeated"
        )
    if draft.take("dtype", "bf16") in ("fp32", "float32"):
        draft.set("train.compute_dtype", "float32", "dtype")
    if draft.take("shuffle", True) is False:
        draft.leave_out("shuffle", False, "each epoch has all rows in another order")
    logger, _ = _part(draft, "metric_logger")
    services = {"WandBLogger": "wandb", "TensorBoardLogger": "tensorboard"}
    if logger in services:
        draft.set("log.report_to", [services[logger]], f"metric_logger: {logger}")
    draft.notes.append(
        "torchtune saves at the end of each epoch; here output.save_steps counts steps"
    )
    draft.convert(_NOT_NEEDED)


DIALECT = Dialect("torchtune", _MARKS, _KEYS, _convert, _DEFAULTS)
