"""The YAML of mlx-lm's ``mlx_lm.lora``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qlora_wgpu.config.dialects import trl
from qlora_wgpu.config.dialects.draft import (
    NO_FULL_FINE_TUNING,
    ONE_EVAL,
    Defaults,
    Dialect,
    Draft,
    RowSpec,
    Source,
    listed,
    mapping_of,
)
from qlora_wgpu.files import is_dir, is_file

# ---- learning rate -------------------------------------------------------------------------------

_RATE = 1e-5
_WITH_MIN_LR = {"cosine": ("cosine_with_min_lr", "min_lr"), "linear": ("polynomial", "lr_end")}


def _convert_schedule(draft: Draft, steps: int) -> None:
    rate, schedule = draft.take("learning_rate", _RATE), draft.take("lr_schedule")
    kind, origin, warmup = "constant", "mlx-lm's default", 0
    if isinstance(schedule, Mapping):
        name, arguments = str(schedule.get("name")), schedule.get("arguments") or [rate]
        warmup, origin = schedule.get("warmup") or 0, f"lr_schedule: {name}"
        if warmup and (warmup_init := schedule.get("warmup_init")):
            draft.drop("lr_schedule.warmup_init", warmup_init, "warmup starts at 0")
        rate, last, updates = arguments[0], None, 0
        if name == "cosine_decay":
            rate, updates, last = (*arguments, 0.0)[:3]
        elif name == "linear_schedule":
            rate, last, updates = arguments
        if last is None:
            draft.drop("lr_schedule", name, "not supported: the learning rate is constant")
        elif last > rate:  # it is a warmup itself
            rate, warmup = last, warmup + updates
        elif last < rate:
            if warmup + updates != steps:
                draft.note(
                    f"the learning rate reaches {last:g} at the last of {steps} updates; with "
                    f"{name} it would after {warmup + updates}"
                )
            kind = "cosine" if name == "cosine_decay" else "linear"
            if last:
                kind, key = _WITH_MIN_LR[kind]
                draft.set("optim.lr_scheduler_kwargs", {key: last}, origin)
    if warmup:
        draft.set("optim.warmup_steps", warmup, "lr_schedule, in updates")
        kind = "constant_with_warmup" if kind == "constant" else kind
    else:
        draft.set("optim.warmup_ratio", 0.0, "without lr_schedule.warmup")
    draft.set("optim.learning_rate", rate, "learning_rate")
    draft.set("optim.lr_scheduler_type", kind, origin)


# ---- the file ------------------------------------------------------------------------------------

_MARKS = (
    "iters lora_parameters num_layers adapter_path steps_per_eval steps_per_report "
    "val_batches save_every grad_checkpoint fine_tune_type mask_prompt lr_schedule "
    "test_batches lora_layers hf_dataset"
)
_KEYS = "model seed batch_size max_seq_length grad_checkpoint adapter_path"
_DEFAULTS: Defaults = {
    "model": {"path": "Qwen/Qwen3-0.6b"},
    "data": {"max_seq_length": 2048},
    "train": {"per_device_train_batch_size": 4, "gradient_checkpointing": False},
    "optim": {"max_grad_norm": 0.0},
    "lora": {"target_modules": "all-linear"},
    "output": {"save_total_limit": None},
}
_DATA, _TRAIN_SPLIT, _VALID_SPLIT = "mlx-community/WikiSQL", "train[:80%]", "train[-10%:]"
_RANK, _SCALE, _LAYERS, _STEPS = 8, 20.0, 16, 1000
_STEP_KEYS = {
    "steps_per_report": ("log.logging_steps", 10),
    "steps_per_eval": ("eval.eval_steps", 200),
    "save_every": ("output.save_steps", 100),
}


def _convert(draft: Draft) -> None:
    if (mode := draft.take("training_mode", "normal")) not in ("normal", "sft"):
        raise draft.refuse("training_mode", mode, "is not supported (supported: normal, sft)")
    kind = draft.take("fine_tune_type", "lora")
    if kind == "dora":
        draft.set("lora.use_dora", True, "fine_tune_type")
    elif kind == "full":
        draft.note(NO_FULL_FINE_TUNING)
    _convert_model(draft)
    _convert_lora(draft)
    _convert_data(draft)
    _convert_loop(draft)


def _convert_model(draft: Draft) -> None:
    model = str(draft.remaining.get("model") or "")
    quantized = "bit" in model.lower()
    trl.set_quantization(draft, 4 if quantized else None, "by the model's name")
    if "model.path" not in draft.overrides and (quantized or model.startswith("mlx-community/")):
        draft.note(
            f"the model {model} is in MLX's format, which is not supported: use the original one "
            "with --model, and keep quant.scheme: nf4"
        )


def _convert_lora(draft: Draft) -> None:
    lora = draft.take("lora_parameters", {})
    rank, scale = lora.get("rank", _RANK), lora.get("scale")
    alpha = lora.get("alpha", _SCALE * rank) if scale is None else scale * rank
    draft.set("lora.r", rank, "lora_parameters.rank")
    origin = f"lora_parameters.scale {alpha / rank:g} times the rank"
    draft.set("lora.lora_alpha", int(alpha) if float(alpha).is_integer() else alpha, origin)
    draft.set("lora.lora_dropout", lora.get("dropout", 0.0), "lora_parameters.dropout")
    if keys := lora.get("keys"):
        names = list(dict.fromkeys(str(key).rpartition(".")[2] for key in keys))
        draft.set("lora.target_modules", names, "lora_parameters.keys")
    count = draft.take("num_layers", draft.take("lora_layers", _LAYERS))
    total = draft.num_layers(str(draft.remaining.get("model") or ""))
    if total is None and count != -1:
        draft.drop("num_layers", count, "the model is unknown, so all layers get an adapter")
    elif total is not None and 0 < count < total:
        layers = list(range(total - count, total))
        draft.set("lora.layers_to_transform", layers, f"num_layers: the last {count} of {total}")
    if (adapter := draft.take("resume_adapter_file")) is not None:
        draft.drop("resume_adapter_file", adapter, "adapters in MLX's format are not supported")


def _convert_data(draft: Draft) -> None:
    entries = [entry for entry in listed(draft.take("hf_dataset", {})) if entry]
    hub = entries[0] if entries else {}
    if hub:
        sources = [
            Source(path)
            for entry in entries
            for path in draft.dataset_paths(*_named(entry), entry.get("train_split", _TRAIN_SPLIT))
        ]
        draft.set_sources(sources, "hf_dataset")
        for entry in entries[1:]:
            draft.drop("hf_dataset", entry.get("path"), ONE_EVAL)
        _convert_valid_split(draft, *_named(hub), hub.get("valid_split", _VALID_SPLIT))
        draft.take("data")
    else:
        folder = draft.resolve(draft.take("data", _DATA))
        draft.set("data.train", folder, "data")
        if not is_dir(Path(folder)) or is_file(Path(folder) / "valid.jsonl"):
            draft.set("data.eval", folder, "data (its validation split)")
    _convert_columns(draft, hub)
    draft.set("data.apply_chat_template", True, "as mlx-lm does for prompts and completions")
    masked = draft.take("mask_prompt", hub.get("mask_prompt", False))
    draft.set("data.train_on", "last_turn" if masked else "all", f"mask_prompt: {bool(masked)}")


def _named(entry: Mapping[str, Any]) -> tuple[str, Any]:
    """A Hub data set's name and configuration."""
    subset = mapping_of(entry.get("config")).get("name")
    return str(entry.get("path") or entry.get("name") or ""), subset


def _convert_valid_split(draft: Draft, name: str, subset: Any, split: Any) -> None:
    if split is None:
        return
    path = draft.dataset_path(name, subset, split)
    if path != draft.get("data.train"):
        draft.set("data.eval", path, "hf_dataset.valid_split")
    else:
        reason = "it is the training data: use data.eval_split to hold rows out"
        draft.drop("valid_split", split, reason)


def _convert_columns(draft: Draft, hub: Mapping[str, Any]) -> None:
    features = {
        key: draft.take(key, hub.get(key))
        for key in ("prompt_feature", "completion_feature", "text_feature", "chat_feature")
    }
    if features["completion_feature"]:
        columns = {key: features[f"{key}_feature"] for key in ("prompt", "completion")}
        origin = "prompt_feature, completion_feature"
        draft.set_rows(RowSpec.named("prompt/completion", columns, origin))
    elif text := features["text_feature"]:
        draft.set_rows(RowSpec.named("text", {"text": text}, "text_feature"))
    elif chat := features["chat_feature"]:
        draft.set_rows(RowSpec.named("messages", {"messages": chat}, "chat_feature"))


def _convert_loop(draft: Draft) -> None:
    accumulation = draft.take("grad_accumulation_steps", 1)
    draft.set("train.gradient_accumulation_steps", accumulation, "grad_accumulation_steps")
    steps = max(draft.take("iters", _STEPS) // accumulation, 1)
    draft.set("train.max_steps", steps, "iters" if accumulation == 1 else "iters / accumulation")
    for key, (ours, default) in _STEP_KEYS.items():
        draft.set(ours, max(draft.take(key, default) // accumulation, 1), key)
    _convert_schedule(draft, steps)
    _convert_optimizer(draft)


def _convert_optimizer(draft: Draft) -> None:
    name = str(draft.take("optimizer", "adam")).lower()
    arguments = mapping_of(mapping_of(draft.take("optimizer_config")).get(name))
    decay = arguments.get("weight_decay", 0.01 if name == "adamw" else 0.0)
    draft.set("optim.weight_decay", decay, f"optimizer: {name}")
    trl.set_betas(draft, arguments, "optimizer_config.betas")
    if "eps" in arguments:
        draft.set("optim.adam_epsilon", arguments["eps"], "optimizer_config.eps")
    if name not in ("adam", "adamw"):
        draft.drop("optimizer", name, "not supported: AdamW is used")
    if not arguments.get("bias_correction"):
        draft.note(f"mlx-lm's {name} has no bias correction unless optimizer_config sets it; here "
                   "it always has, so the first steps are smaller")  # fmt: skip
    project, services = draft.take("wandb"), draft.take("report_to", "")
    names = [name.strip() for name in str(services).split(",") if name.strip()]
    if project is not None or "wandb" in names:
        draft.set("log.report_to", ["wandb"], "report_to" if "wandb" in names else "wandb")
    if others := [name for name in names if name != "wandb"]:
        draft.drop("report_to", ", ".join(others), f"supported: {', '.join(trl.REPORTS)}")


DIALECT = Dialect("mlx-lm", _MARKS, _KEYS, _convert, _DEFAULTS)
