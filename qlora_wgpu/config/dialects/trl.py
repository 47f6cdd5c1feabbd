"""Keys of transformers' TrainingArguments, and the YAML of ``trl sft``, ``dpo`` and ``kto``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qlora_wgpu.config.dialects import preferences
from qlora_wgpu.config.dialects.draft import (
    NO_COUNTERPART,
    NO_FULL_FINE_TUNING,
    ONE_EVAL,
    PACKED_ATTENTION,
    Defaults,
    Dialect,
    Draft,
    RowSpec,
    Source,
    listed,
    words_of,
)
from qlora_wgpu.config.names import reason_for
from qlora_wgpu.config.sections.train import SCHEDULES, check_schedule
from qlora_wgpu.config.values import LOSS, OPTIMIZERS, eval_metrics

# ---- transformers' keys --------------------------------------------------------------------------

KEYS = (
    "num_train_epochs max_steps per_device_train_batch_size gradient_accumulation_steps "
    "gradient_checkpointing label_smoothing_factor neftune_noise_alpha seed learning_rate "
    "weight_decay max_grad_norm adam_beta1 adam_beta2 adam_epsilon loraplus_lr_ratio logging_steps "
    "output_dir save_steps save_total_limit load_best_model_at_end use_rslora use_dora "
    "init_lora_weights modules_to_save lora_modules_to_save ensure_weight_tying "
    "trainable_token_indices lora_dropout"
)
DEFAULTS: Defaults = {
    "train": {
        "num_train_epochs": 3.0,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "seed": 42,
    },
    "optim": {"lr_scheduler_type": "linear", "warmup_ratio": 0.0},
    "output": {"save_steps": 500, "save_total_limit": None},
}
PEFT_TARGETS = ["q_proj", "v_proj"]
"""PEFT's default of target_modules for nearly every supported family."""
NO_EVAL_DATA = "there is no evaluation data"
INTEGER_STEPS = "must be an integer number of steps"
_RATE = 5e-5
REPORTS = ("tensorboard", "wandb", "trackio")


def convert_training(draft: Draft) -> None:
    """Converts the keys that differ in more than their names."""
    convert_schedule(draft, "lr_scheduler_type")
    convert_precision(draft)
    convert_optimizer(draft, "optim")
    for key in ("logging_steps", "save_steps"):
        if isinstance(draft.remaining.get(key), float):
            draft.drop_key(key, INTEGER_STEPS)
    names = listed(draft.take("report_to", []))
    if kept := [name for name in names if name in REPORTS]:
        draft.set("log.report_to", kept, "report_to")
    if others := [name for name in names if name not in (*REPORTS, "none")]:
        draft.drop("report_to", others, f"supported: {', '.join(REPORTS)}")
    convert_best(draft)
    if draft.take("save_strategy") in ("no", "epoch"):
        draft.drop_key("save_steps", "save_strategy is by epoch or never; use output.save_steps")


def convert_schedule(draft: Draft, key: str) -> None:
    """Converts the learning rate schedule, its arguments and its warmup."""
    schedule, arguments = draft.take(key), draft.take("lr_scheduler_kwargs", {})
    if schedule in SCHEDULES:
        _set_schedule(draft, key, schedule, arguments)
    elif schedule is not None:
        draft.set("optim.lr_scheduler_type", "cosine", f"nearest to {key}: {schedule}")
        draft.drop(key, schedule, f"supported: {', '.join(SCHEDULES)}")
    steps, ratio = draft.take("warmup_steps"), draft.take("warmup_ratio")
    if draft.get("optim.lr_scheduler_type") == "constant":
        draft.set("optim.warmup_ratio", 0.0, "a constant learning rate has no warmup")
        for name, value in (("warmup_steps", steps), ("warmup_ratio", ratio)):
            if value:
                draft.drop(name, value, "constant has no warmup, here and in transformers; "
                           "use optim.lr_scheduler_type: constant_with_warmup")  # fmt: skip
        return
    if isinstance(steps, float) and 0 < steps < 1:  # a ratio since transformers 5
        steps, ratio = None, steps
    if steps:
        draft.set("optim.warmup_steps", int(steps), "warmup_steps")
    elif ratio is not None:
        draft.set("optim.warmup_ratio", ratio, "warmup_ratio")
    elif steps is not None:  # 0, instead of our default ratio
        draft.set("optim.warmup_ratio", 0.0, "warmup_steps: 0")


def _set_schedule(draft: Draft, key: str, schedule: str, arguments: Any) -> None:
    """Sets a schedule, or cosine if it lacks required arguments."""
    rate = draft.remaining.get("learning_rate") or _RATE
    problem = _schedule_problem(schedule, arguments, rate)
    if problem and arguments:
        draft.drop("lr_scheduler_kwargs", arguments, f"it {problem}")
    elif problem:
        draft.drop(key, schedule, f"lr_scheduler_kwargs {problem}")
    elif arguments:
        draft.set("optim.lr_scheduler_kwargs", dict(arguments), "lr_scheduler_kwargs")
    if problem and _schedule_problem(schedule, {}, rate):
        draft.set("optim.lr_scheduler_type", "cosine", f"nearest to {key}: {schedule}")
    else:
        draft.set("optim.lr_scheduler_type", schedule, key)


def _schedule_problem(schedule: str, arguments: Any, rate: Any) -> str:
    if not isinstance(arguments, Mapping):
        return "must be a mapping"
    try:
        check_schedule(schedule, arguments, float(rate))
    except ValueError as err:
        return str(err)
    return ""


def convert_precision(draft: Draft) -> None:
    """Converts ``bf16`` and ``fp16``."""
    bf16 = draft.take("bf16", draft.take("bfloat16"))
    fp16 = draft.take("fp16", draft.take("float16"))
    if bf16 in (True, "auto", "full") or draft.take("pure_bf16"):
        draft.set("train.compute_dtype", "bfloat16", "bf16")
    elif fp16:
        draft.set("train.compute_dtype", "bfloat16", "nearest to fp16, which is not supported")
    elif bf16 is False and fp16 is not True:
        draft.set("train.compute_dtype", "float32", "bf16: false")


def convert_optimizer(draft: Draft, key: str) -> None:
    """Converts the optimizer's name, or notes that it is not supported."""
    optimizer = draft.take(key)
    if optimizer is None:
        return
    name = str(optimizer).lower()
    if name in OPTIMIZERS:
        draft.set("optim.name", OPTIMIZERS[name], f"{key}: {optimizer}")
    elif "lion" in name or "adamw" in name:
        near = "lion" if "lion" in name else "adamw_8bit" if "8bit" in name else "adamw"
        draft.set("optim.name", near, f"nearest to {key}: {optimizer}")
    else:
        draft.drop(key, optimizer, "not supported (supported: AdamW, Lion)")
    beta2 = draft.remaining.get("adam_beta2", draft.get("optim.adam_beta2"))
    if "lion" in name and name != "lion_pytorch" and beta2 is None:
        draft.set("optim.adam_beta2", 0.999, f"transformers' default, for {optimizer} as well")


def convert_evaluation(draft: Draft, logging_steps: int) -> None:
    """Converts ``eval_strategy`` and ``eval_steps``, which default to the logging steps."""
    strategy = draft.take("eval_strategy", draft.take("evaluation_strategy"))
    steps = draft.take("eval_steps")
    if not {"data.eval", "data.eval_split"} & draft.settings.keys():
        if steps is not None:
            draft.drop("eval_steps", steps, NO_EVAL_DATA)
        return
    if strategy == "epoch":
        epochs = draft.remaining.get("num_train_epochs") or 3.0
        draft.set("eval.eval_steps", fraction_of_run(1, epochs), "eval_strategy: epoch")
    elif steps:
        draft.set("eval.eval_steps", steps, "eval_steps")
    elif strategy == "steps":
        every = draft.remaining.get("logging_steps") or logging_steps
        draft.set("eval.eval_steps", every, "eval_strategy: steps defaults to logging_steps")


def fraction_of_run(per_epoch: float, epochs: float) -> float | int:
    """Some evaluations per epoch as eval.eval_steps; 0 is only at the end."""
    times = per_epoch * epochs
    return round(1 / times, 6) if times > 1 else 0


def convert_best(draft: Draft) -> None:
    """Converts the metric for the best adapter."""
    metric, greater = draft.take("metric_for_best_model"), draft.take("greater_is_better")
    objective = str(draft.get("train.objective", "sft"))
    known = eval_metrics(objective, draft.get("train.loss_type"))
    name = LOSS if metric is None else str(metric).removeprefix("eval_")
    if name not in known:
        draft.drop("metric_for_best_model", metric, f"the metrics are {', '.join(known)}")
        return
    if metric is not None:
        draft.set("eval.metric_for_best_model", name, "metric_for_best_model")
    if greater and name == LOSS:
        draft.drop("greater_is_better", greater, "a lower loss is better")
    elif greater is not None:
        draft.set("eval.greater_is_better", greater, "greater_is_better")


def set_betas(draft: Draft, arguments: Mapping[str, Any], origin: str) -> None:
    """Sets the betas of an optimizer that has them as one argument."""
    if betas := arguments.get("betas"):
        draft.set("optim.adam_beta1", betas[0], origin)
        draft.set("optim.adam_beta2", betas[1], origin)


def set_quantization(draft: Draft, bits: int | None, origin: str) -> None:
    """Sets quant.scheme; None is unquantized."""
    draft.set("quant.scheme", "nf4" if bits == 4 else "none", origin)
    if bits not in (None, 4):
        draft.note(
            f"{bits}-bit quantization is not supported: `quant.scheme: nf4` takes less memory"
        )


# ---- TRL -----------------------------------------------------------------------------------------

_MARKS = (
    "model_name_or_path dataset_name use_peft lora_r lora_target_modules load_in_4bit "
    "dataset_text_field dataset_train_split assistant_only_loss completion_only_loss "
    "max_length per_device_train_batch_size dataset_config dataset_mixer dataset_splits "
    "dataset_configs dataset_mixture lora_modules_to_save lora_task_type"
)
_KEYS = (
    f"{KEYS} "
    "model_name_or_path lora_r lora_alpha lora_target_modules max_length max_seq_length packing "
    "router_aux_loss_coef use_bnb_nested_quant bnb_4bit_use_double_quant"
)
_NOT_NEEDED = {
    "bnb_4bit_quant_type": "4-bit quantization is always nf4",
    "bnb_4bit_compute_dtype": "use train.compute_dtype",
    "bnb_4bit_quant_storage": "weights are stored as WebGPU expects them",
    "torch_dtype": "weights are read in the data type of their files",
    "dtype": "weights are read in the data type of their files",
}
_ENTRY = "path id name config data_files data_dir split fraction weight"
_DEFAULTS: Defaults = {
    **DEFAULTS,
    "lora": {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": PEFT_TARGETS},
    "quant": {"double_quant": False},
    "data": {"max_seq_length": 1024},
    "optim": {**DEFAULTS["optim"], "learning_rate": 2e-5},
    "log": {"logging_steps": 10},
}


def _convert(draft: Draft) -> None:
    objective = preferences.convert_trl(draft)
    if not draft.take("use_peft", True):
        draft.note(NO_FULL_FINE_TUNING)
    four, eight = draft.take("load_in_4bit"), draft.take("load_in_8bit")
    bits = 4 if four else 8 if eight else None
    set_quantization(draft, bits, "load_in_4bit" if four else f"{bits or 16} bits")
    draft.convert(_NOT_NEEDED)
    modules = draft.remaining.get("lora_target_modules")
    if modules == ["all-linear"]:
        draft.remaining["lora_target_modules"] = "all-linear"
    elif isinstance(modules, str) and modules != "all-linear":
        draft.remaining["lora_target_modules"] = words_of(modules)
    _convert_data(draft)
    _convert_loss_mask(draft, objective)
    preferences.settle_rows(draft, objective)
    convert_evaluation(draft, _DEFAULTS["log"]["logging_steps"])
    convert_training(draft)


def _convert_data(draft: Draft) -> None:
    name, config = draft.take("dataset_name"), draft.take("dataset_config")
    train, test = draft.take("dataset_train_split"), draft.take("dataset_test_split", "test")
    nested = draft.take("dataset_mixture", {})  # of the alignment handbook
    given = draft.take("datasets", nested.get("datasets", []))
    mixture = [entry for entry in given if isinstance(entry, Mapping)]
    if mixture:
        _convert_mixture(draft, mixture, train)
        name = None
        if (size := draft.take("test_split_size", nested.get("test_split_size"))) is not None:
            draft.set("data.eval_split", size, "test_split_size")
    mixer, splits = draft.take("dataset_mixer", {}), draft.take("dataset_splits", [])
    if mixer and name is None and not mixture:
        _convert_mixer(draft, mixer, splits, config)
    elif name is not None:
        draft.set("data.train", draft.dataset_path(str(name), config, train), "dataset_name")
        _convert_test_split(draft, str(name), config, test)
    if draft.remaining.get("truncation_mode") in ("keep_start", "keep_end"):
        draft.convert({"truncation_mode": "data.truncation"})
    if draft.remaining.get("packing") and draft.remaining.get("packing_strategy") == "wrapped":
        draft.note(f"packing_strategy: wrapped splits rows that do not fit; here none is "
                           f"split, and {PACKED_ATTENTION}")  # fmt: skip
    if (text := draft.take("dataset_text_field", "text")) != "text":
        draft.set_rows(RowSpec.named("text", {"text": text}, "dataset_text_field"))
    for key in ("chat_template_path", "chat_template"):
        draft.set_chat_template(draft.take(key), key)


def _convert_mixer(draft: Draft, mixer: Mapping[str, float], splits: Any, config: Any) -> None:
    """Converts the alignment handbook's data sets, each with a fraction of its rows."""
    configs = listed(draft.take("dataset_configs", [config] * len(mixer)))
    if len(configs) != len(mixer):
        raise draft.refuse("dataset_configs", configs, f"must have {len(mixer)} entries, as "
                           "dataset_mixer does")  # fmt: skip
    splits = splits or ["train", "test"]
    train_splits = [split for split in splits if "train" in split]
    test_splits = [split for split in splits if "train" not in split]
    if not train_splits:
        raise draft.refuse("dataset_splits", splits, "must include a split to train on")
    sources = []
    for (path, share), subset in zip(mixer.items(), configs, strict=True):
        for split in train_splits:
            rows = f"[:{100 * share:g}%]" if 0 < share < 1 and (100 * share).is_integer() else ""
            portion = {"rows": share} if 0 < share < 1 and not rows else {}
            place = draft.dataset_path(str(path), subset, split + rows)
            sources.append(Source(place, portion=portion))
    draft.set_sources(sources, "dataset_mixer")
    if test_splits:
        _convert_test_split(draft, str(next(iter(mixer))), configs[0], test_splits[0])
        others = [*test_splits[1:], *list(mixer)[1:]]
        if others and "data.eval" in draft.settings:
            draft.drop("dataset_splits", ", ".join(others), ONE_EVAL)
    if (text := draft.take("text_column")) is not None:
        draft.set_rows(RowSpec.named("text", {"text": text}, "text_column"))


def _convert_mixture(draft: Draft, entries: Sequence[Mapping[str, Any]], split: Any) -> None:
    """Converts several data sets, each with all rows, a fraction or a weight."""
    sources = []
    for number, entry in enumerate(entries):
        key = f"datasets[{number}]"
        name, subset = entry.get("path", entry.get("id")), entry.get("name", entry.get("config"))
        files, fraction = entry.get("data_files"), entry.get("fraction")
        portion: dict[str, float] = {}
        if fraction is not None:
            portion = {"weight": fraction}
        elif (share := entry.get("weight", 1)) != 1:  # in the handbook, a fraction of the rows
            portion = {"rows": share}
        names = files if isinstance(files, list) else [files] if isinstance(files, str) else []
        paths = draft.file_paths(names, entry.get("split"), key) if names else []
        if files and not names:
            draft.drop(f"{key}.data_files", files, "must be a list of files")
        if folder := entry.get("data_dir"):
            draft.drop(f"{key}.data_dir", folder, "set path to the folder or the files")
        if portion and len(paths) > 1:
            draft.drop(key, portion, "all rows of several files are used: adapt data.sources")
            portion = {}
        paths = paths or draft.dataset_paths(str(name), subset, entry.get("split", split))
        for other, value in entry.items():
            if other not in _ENTRY.split() and value is not None:
                reason = reason_for(other) or NO_COUNTERPART
                if other == "columns":
                    reason = "use data.format and data.columns"
                draft.drop(f"{key}.{other}", value, reason)
        sources += [Source(path, portion=portion) for path in paths]
    draft.set_sources(sources, "datasets")


def _convert_test_split(draft: Draft, name: str, config: Any, split: Any) -> None:
    strategy = draft.remaining.get(
        "eval_strategy", draft.remaining.get("evaluation_strategy", "no")
    )
    if strategy in ("no", False):
        return
    if draft.is_file(name):
        reason = "a file has no test split: set data.eval or data.eval_split"
        draft.drop("eval_strategy", strategy, reason)
    else:
        draft.set("data.eval", draft.dataset_path(name, config, split), "dataset_test_split")


def _convert_loss_mask(draft: Draft, objective: str) -> None:
    assistant, completion = draft.take("assistant_only_loss"), draft.take("completion_only_loss")
    if assistant:
        draft.set("data.train_on", "assistant", "assistant_only_loss")
    elif completion is False:
        draft.set("data.train_on", "all", "completion_only_loss: false")
    elif completion is None and objective == "sft":
        draft.note(
            "in chats, TRL takes the loss on all tokens unless assistant_only_loss is set; here "
            "only on the assistant's turns, unless `data.train_on: all` is set"
        )


DIALECT = Dialect("TRL", _MARKS, _KEYS, _convert, _DEFAULTS)
