"""Keys of transformers' TrainingArguments, and the YAML of ``trl sft``, ``dpo`` and ``kto``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qlora_wgpu.config.dialects import preferences
from qlora_wgpu.config.dialects.draft import (
    PACKED_APART,
    Defaults,
    Dialect,
    Draft,
    RowsOf,
    Source,
    listed,
)
from qlora_wgpu.config.names import reason_for
from qlora_wgpu.config.schedules import ARGUMENTS, check_schedule
from qlora_wgpu.config.values import LOSS, OPTIMIZERS, eval_metrics

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
"""What PEFT adapts where no modules are named, of nearly every family that is read here."""
_RATE = 5e-5
_REPORTS = ("tensorboard", "wandb", "trackio")


def convert_training(draft: Draft) -> None:
    """Takes over what more than a name differs in."""
    convert_schedule(draft, "lr_scheduler_type")
    convert_precision(draft)
    convert_optimizer(draft, "optim")
    for key in ("logging_steps", "save_steps"):
        if isinstance(draft.theirs.get(key), float):
            draft.drop(key, "a whole number of steps is needed")
    names = listed(draft.take("report_to", []))
    if kept := [name for name in names if name in _REPORTS]:
        draft.set("log.report_to", kept, "report_to")
    if others := [name for name in names if name not in (*_REPORTS, "none")]:
        draft.leave_out("report_to", others, "TensorBoard and Weights & Biases are written to")
    convert_best(draft)
    if draft.take("save_strategy") in ("no", "epoch"):
        draft.drop("save_steps", "save_strategy saves by epochs or never; here steps decide")


def convert_schedule(draft: Draft, key: str) -> None:
    """The learning rate's shape, what it takes beside, and its warm-up."""
    shape, given = draft.take(key), draft.take("lr_scheduler_kwargs", {})
    if shape in ARGUMENTS:
        _set_schedule(draft, key, shape, given)
    elif shape is not None:
        draft.set("optim.lr_scheduler_type", "cosine", f"nearest to {key}: {shape}")
        draft.leave_out(key, shape, f"the shapes are {', '.join(ARGUMENTS)}")
    steps, ratio = draft.take("warmup_steps"), draft.take("warmup_ratio")
    if draft.value_of("optim.lr_scheduler_type") == "constant":
        draft.set("optim.warmup_ratio", 0.0, "a constant rate has no warm-up")
        for name, value in (("warmup_steps", steps), ("warmup_ratio", ratio)):
            if value:
                draft.leave_out(name, value, "a constant rate has no warm-up, there as here; "
                                "optim.lr_scheduler_type: constant_with_warmup has one"
                                )  # fmt: skip
        return
    if isinstance(steps, float) and 0 < steps < 1:  # as transformers 5 takes it
        steps, ratio = None, steps
    if steps:
        draft.set("optim.warmup_steps", int(steps), "warmup_steps")
    elif ratio is not None:
        draft.set("optim.warmup_ratio", ratio, "warmup_ratio")
    elif steps is not None:  # zero, which must not become the default of ours
        draft.set("optim.warmup_ratio", 0.0, "warmup_steps: 0")


def _set_schedule(draft: Draft, key: str, shape: str, given: Any) -> None:
    """A shape by its name, or the nearest one where it lacks what it needs."""
    rate = draft.theirs.get("learning_rate") or _RATE
    fault = _fault(shape, given, rate)
    if fault and given:
        draft.leave_out("lr_scheduler_kwargs", given, f"it {fault}")
    elif fault:
        draft.leave_out(key, shape, f"lr_scheduler_kwargs {fault}")
    elif given:
        draft.set("optim.lr_scheduler_kwargs", dict(given), "lr_scheduler_kwargs")
    if fault and _fault(shape, {}, rate):
        draft.set("optim.lr_scheduler_type", "cosine", f"nearest to {key}: {shape}")
    else:
        draft.set("optim.lr_scheduler_type", shape, key)


def _fault(shape: str, given: Any, rate: Any) -> str:
    """What is wrong with a schedule's arguments, if anything is."""
    if not isinstance(given, Mapping):
        return "must be a mapping"
    try:
        check_schedule(shape, given, float(rate))
    except ValueError as err:
        return str(err)
    return ""


def convert_precision(draft: Draft) -> None:
    """The type of matmul operands."""
    bf16 = draft.take("bf16", draft.take("bfloat16"))
    fp16 = draft.take("fp16", draft.take("float16"))
    if bf16 in (True, "auto", "full") or draft.take("pure_bf16"):
        draft.set("train.compute_dtype", "bfloat16", "bf16")
    elif fp16:
        draft.set("train.compute_dtype", "bfloat16", "nearest to fp16, which is not done")
    elif bf16 is False and fp16 is not True:
        draft.set("train.compute_dtype", "float32", "bf16: false")


def convert_optimizer(draft: Draft, key: str) -> None:
    """Which optimizer trains; says so where one is named that is not done."""
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
        draft.leave_out(key, optimizer, "AdamW or Lion trains here; another is not done")
    given = draft.theirs.get("adam_beta2", draft.value_of("optim.adam_beta2"))
    if "lion" in name and name != "lion_pytorch" and given is None:
        draft.set("optim.adam_beta2", 0.999, f"transformers' default for {optimizer}, too")


def convert_evaluation(draft: Draft, logging_steps: int) -> None:
    """How often held-out data is measured, by default as often as the trainer logs."""
    strategy = draft.take("eval_strategy", draft.take("evaluation_strategy"))
    steps = draft.take("eval_steps")
    if not {"data.eval", "data.eval_split"} & draft.taken.keys():
        if steps is not None:
            draft.leave_out("eval_steps", steps, "there is no held-out data")
        return
    if strategy == "epoch":
        epochs = draft.theirs.get("num_train_epochs") or 3.0
        draft.set("eval.eval_steps", share_of_run(1, epochs), "eval_strategy: epoch")
    elif steps:
        draft.set("eval.eval_steps", steps, "eval_steps")
    elif strategy == "steps":
        every = draft.theirs.get("logging_steps") or logging_steps
        draft.set("eval.eval_steps", every, "eval_strategy: steps goes by logging_steps")


def share_of_run(per_epoch: float, epochs: float) -> float | int:
    """Evaluations of an epoch as a fraction of the whole run; 0 stands for the end only."""
    times = per_epoch * epochs
    return round(1 / times, 6) if times > 1 else 0


def convert_best(draft: Draft) -> None:
    """Which figure says what the best adapter is."""
    metric, greater = draft.take("metric_for_best_model"), draft.take("greater_is_better")
    objective = str(draft.value_of("train.objective", "sft"))
    known = eval_metrics(objective, draft.value_of("train.loss_type"))
    name = LOSS if metric is None else str(metric).removeprefix("eval_")
    if name not in known:
        draft.leave_out("metric_for_best_model", metric, f"evaluations give {', '.join(known)}")
        return
    if metric is not None:
        draft.set("eval.metric_for_best_model", name, "metric_for_best_model")
    if greater and name == LOSS:
        draft.leave_out("greater_is_better", greater, "the lowest loss is the best")
    elif greater is not None:
        draft.set("eval.greater_is_better", greater, "greater_is_better")


def set_betas(draft: Draft, arguments: Mapping[str, Any], origin: str) -> None:
    """Decay rates of an optimizer that takes both as one argument."""
    if betas := arguments.get("betas"):
        draft.set("optim.adam_beta1", betas[0], origin)
        draft.set("optim.adam_beta2", betas[1], origin)


def set_quantization(draft: Draft, bits: int | None, origin: str) -> None:
    """How the base is stored."""
    draft.set("quant.scheme", "nf4" if bits == 4 else "none", origin)
    if bits not in (None, 4):
        draft.notes.append(f"{bits} bits are not done: `quant.scheme: nf4` takes less memory")


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
_NOT_TAKEN = {
    "bnb_4bit_quant_type": "4 bits are always nf4",
    "bnb_4bit_compute_dtype": "train.compute_dtype is bfloat16 unless it says float32",
    "bnb_4bit_quant_storage": "weights are stored as WebGPU reads them",
    "torch_dtype": "weights are read in the type of their files",
    "dtype": "weights are read in the type of their files",
}
_ENTRY = "path id name config data_files data_dir split fraction weight"
_DEFAULTS: Defaults = {
    **DEFAULTS,
    "lora": {
        "r": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.05,
        "target_modules": PEFT_TARGETS,
    },
    "quant": {"double_quant": False},
    "data": {"max_seq_length": 1024},
    "optim": {**DEFAULTS["optim"], "learning_rate": 2e-5},
    "log": {"logging_steps": 10},
}


def _convert(draft: Draft) -> None:
    objective = preferences.convert_trl(draft)
    if not draft.take("use_peft", True):
        draft.notes.append("TRL trains every weight of the model here; a LoRA adapter is made")
    four, eight = draft.take("load_in_4bit"), draft.take("load_in_8bit")
    bits = 4 if four else 8 if eight else None
    set_quantization(draft, bits, "load_in_4bit" if four else f"{bits or 16} bits")
    draft.convert(_NOT_TAKEN)
    modules = draft.theirs.get("lora_target_modules")
    if modules == ["all-linear"]:
        draft.theirs["lora_target_modules"] = "all-linear"
    elif isinstance(modules, str) and modules != "all-linear":
        draft.theirs["lora_target_modules"] = modules.replace(",", " ").split()
    _convert_data(draft)
    _convert_learnt(draft, objective)
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
        _mix(draft, mixture, train)
        name = None
        if (size := draft.take("test_split_size", nested.get("test_split_size"))) is not None:
            draft.set("data.eval_split", size, "test_split_size")
    mixer, splits = draft.take("dataset_mixer", {}), draft.take("dataset_splits", [])
    if mixer and name is None and not mixture:  # as in the alignment handbook
        _convert_mixer(draft, mixer, splits, config)
    elif name is not None:
        draft.set("data.train", draft.hub_place(str(name), config, train), "dataset_name")
        _convert_held_out(draft, str(name), config, test)
    if draft.theirs.get("truncation_mode") in ("keep_start", "keep_end"):
        draft.convert({"truncation_mode": "data.truncation"})
    if draft.theirs.get("packing") and draft.theirs.get("packing_strategy") == "wrapped":
        draft.notes.append(f"packing_strategy: wrapped cuts rows where a sequence is full; "
                           f"{PACKED_APART}, and none is cut")  # fmt: skip
    if (text := draft.take("dataset_text_field", "text")) != "text":
        draft.set_rows(RowsOf.named("text", {"text": text}, "dataset_text_field"))
    for key in ("chat_template_path", "chat_template"):
        draft.set_template(draft.take(key), key)


def _convert_mixer(draft: Draft, mixer: Mapping[str, float], splits: Any, config: Any) -> None:
    """The alignment handbook's data sets, each with the share of its rows that is taken."""
    configs = listed(draft.take("dataset_configs", [config] * len(mixer)))
    if len(configs) != len(mixer):
        raise draft.refuse("dataset_configs", configs, f"has not {len(mixer)} as dataset_mixer")
    splits = splits or ["train", "test"]
    learnt = [split for split in splits if "train" in split]
    tests = [split for split in splits if "train" not in split]
    if not learnt:
        raise draft.refuse("dataset_splits", splits, "names no split to train on")
    sources = []
    for (path, share), subset in zip(mixer.items(), configs, strict=True):
        for split in learnt:
            rows = f"[:{100 * share:g}%]" if 0 < share < 1 and (100 * share).is_integer() else ""
            place = draft.hub_place(str(path), subset, split + rows)
            portion = {"rows": share} if 0 < share < 1 and not rows else {}
            sources.append(Source(place, portion=portion))
    draft.set_sources(sources, "dataset_mixer")
    if tests:
        _convert_held_out(draft, str(next(iter(mixer))), configs[0], tests[0])
        others = [*tests[1:], *list(mixer)[1:]]
        if others and "data.eval" in draft.taken:
            draft.leave_out("dataset_splits", ", ".join(others), "data.eval names one data set")
    if (text := draft.take("text_column")) is not None:
        draft.set_rows(RowsOf.named("text", {"text": text}, "text_column"))


def _convert_learnt(draft: Draft, objective: str) -> None:
    """Which tokens of a supervised row are learnt."""
    assistant, completion = draft.take("assistant_only_loss"), draft.take("completion_only_loss")
    if assistant:
        draft.set("data.train_on", "assistant", "assistant_only_loss")
    elif completion is False:
        draft.set("data.train_on", "all", "completion_only_loss: false")
    elif completion is None and objective == "sft":
        draft.notes.append(
            "of chats TRL learns every token unless assistant_only_loss is set, this program the "
            "assistant's turns: `data.train_on: all` does as TRL"
        )


def _mix(draft: Draft, entries: Sequence[Mapping[str, Any]], split: Any) -> None:
    """Several data sets, of which all rows are taken, or as many as their shares say."""
    sources = []
    for number, entry in enumerate(entries):
        key = f"datasets[{number}]"
        name, subset = entry.get("path", entry.get("id")), entry.get("name", entry.get("config"))
        files, fraction = entry.get("data_files"), entry.get("fraction")
        portion: dict[str, float] = {}
        if fraction is not None:
            portion = {"weight": fraction}
        elif (share := entry.get("weight", 1)) != 1:  # the handbook's, of the data set's own rows
            portion = {"rows": share}
        listed = files if isinstance(files, list) else [files] if isinstance(files, str) else []
        places = draft.file_places(listed, entry.get("split"), key) if listed else []
        if files and not listed:
            draft.leave_out(f"{key}.data_files", files, "name the files")
        if folder := entry.get("data_dir"):
            draft.leave_out(f"{key}.data_dir", folder, "name the folder, or the files")
        if portion and len(places) > 1:
            draft.leave_out(key, portion, "of several files all rows are taken: set it by hand")
            portion = {}
        places = places or draft.hub_places(str(name), subset, entry.get("split", split))
        for other, value in entry.items():
            if other not in _ENTRY.split() and value is not None:
                reason = "the columns of a format are read, as data.format and data.columns say"
                if other != "columns":
                    reason = reason_for(other) or "no counterpart here"
                draft.leave_out(f"{key}.{other}", value, reason)
        sources += [Source(place, portion=portion) for place in places]
    draft.set_sources(sources, "datasets")


def _convert_held_out(draft: Draft, name: str, config: Any, split: Any) -> None:
    strategy = draft.theirs.get("eval_strategy", draft.theirs.get("evaluation_strategy", "no"))
    if strategy in ("no", False):
        return
    if draft.is_file(name):
        draft.leave_out("eval_strategy", strategy, "a file has no test split: data.eval names "
                        "another, data.eval_split holds rows of it out")  # fmt: skip
    else:
        draft.set("data.eval", draft.hub_place(name, config, split), "dataset_test_split")


DIALECT = Dialect("TRL", _MARKS, _KEYS, _convert, _DEFAULTS)
