"""The YAML of mlx-lm's ``mlx_lm.lora``, with its learning rate's schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qlora_wgpu.config.dialects import trl
from qlora_wgpu.config.dialects.draft import Defaults, Dialect, Draft, RowsOf, Source, listed
from qlora_wgpu.files import is_dir, is_file

# ---- schedules -----------------------------------------------------------------------------------

_RATE = 1e-5
_ENDING = {"cosine": ("cosine_with_min_lr", "min_lr"), "linear": ("polynomial", "lr_end")}


def _shape(name: str, arguments: Sequence[Any]) -> tuple[float, float, int] | None:
    """The rates that a schedule begins and ends with, and its updates; None if it never ends."""
    if name == "cosine_decay":
        first, updates, *end = arguments
        return first, end[0] if end else 0.0, updates
    if name == "linear_schedule":
        first, last, updates = arguments
        return first, last, updates
    return None


def _convert_schedule(draft: Draft, steps: int) -> None:
    """The rate's shape."""
    rate, schedule = draft.take("learning_rate", _RATE), draft.take("lr_schedule")
    kind, origin, warmup = "constant", "mlx-lm's default", 0
    if isinstance(schedule, Mapping):
        name, arguments = str(schedule.get("name")), schedule.get("arguments") or [rate]
        warmup, origin = schedule.get("warmup") or 0, f"lr_schedule: {name}"
        begin = schedule.get("warmup_init")
        if warmup and begin:
            draft.leave_out("lr_schedule.warmup_init", begin, "a warm-up begins at zero")
        rate, last, updates = _shape(name, arguments) or (arguments[0], None, 0)
        if last is None:
            reason = "the rate stays as it begins: there is no such shape"
            draft.leave_out("lr_schedule", name, reason)
        elif last > rate:  # it is a warm-up itself
            rate, warmup = last, warmup + updates
        elif last < rate:
            if warmup + updates != steps:
                end = f"{last:g}" if last else "zero"
                draft.notes.append(
                    f"the learning rate falls to {end} at the last of {steps} updates; {name} "
                    f"would bring it to {last:g} after {warmup + updates}"
                )
            kind = "cosine" if name == "cosine_decay" else "linear"
            if last:
                kind, key = _ENDING[kind]
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
_DATA = "mlx-community/WikiSQL"
_TRAIN_SPLIT, _VALID_SPLIT = "train[:80%]", "train[-10%:]"
_RANK, _SCALE, _LAYERS, _STEPS = 8, 20.0, 16, 1000
_STEP_KEYS = {
    "steps_per_report": ("log.logging_steps", 10),
    "steps_per_eval": ("eval.eval_steps", 200),
    "save_every": ("output.save_steps", 100),
}


def _convert(draft: Draft) -> None:
    if (mode := draft.take("training_mode", "normal")) not in ("normal", "sft"):
        raise draft.refuse("training_mode", mode, "is not done: training is supervised")
    kind = draft.take("fine_tune_type", "lora")
    if kind == "dora":
        draft.set("lora.use_dora", True, "fine_tune_type")
    elif kind == "full":
        draft.notes.append("mlx-lm trains every weight of the model here; a LoRA adapter is made")
    _convert_model(draft)
    _convert_lora(draft)
    _convert_data(draft)
    _convert_loop(draft)


def _convert_model(draft: Draft) -> None:
    model = str(draft.theirs.get("model") or "")
    quantized = "bit" in model.lower()
    trl.set_quantization(draft, 4 if quantized else None, "by the model's name")
    if "model.path" not in draft.given and (quantized or model.startswith("mlx-community/")):
        draft.notes.append(
            f"the model {model} is in MLX's form, which is not read: name the one it was made from "
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
    total = draft.num_layers(str(draft.theirs.get("model") or ""))
    if total is None and count != -1:
        draft.leave_out("num_layers", count, "all layers are adapted: the model is not known here")
    elif total is not None and 0 < count < total:
        layers = list(range(total - count, total))
        draft.set("lora.layers_to_transform", layers, f"num_layers: the last {count} of {total}")
    if (adapter := draft.take("resume_adapter_file")) is not None:
        draft.leave_out("resume_adapter_file", adapter, "an adapter in MLX's form is not read")


def _convert_data(draft: Draft) -> None:
    entries = [entry for entry in listed(draft.take("hf_dataset", {})) if entry]
    hub = entries[0] if entries else {}
    if hub:
        sources = [
            Source(place)
            for entry in entries
            for place in draft.hub_places(*_named(entry), entry.get("train_split", _TRAIN_SPLIT))
        ]
        draft.set_sources(sources, "hf_dataset")
        for entry in entries[1:]:
            draft.leave_out("hf_dataset", entry.get("path"), "held-out data is one data set's")
        _convert_valid_split(draft, *_named(hub), hub.get("valid_split", _VALID_SPLIT))
        draft.take("data")
    else:
        folder = draft.place(draft.take("data", _DATA))
        draft.set("data.train", folder, "data")
        if not is_dir(Path(folder)) or is_file(Path(folder) / "valid.jsonl"):
            draft.set("data.eval", folder, "data, its validation split")
    _convert_columns(draft, hub)
    draft.set("data.apply_chat_template", True, "prompts and completions are turns of a chat")
    masked = draft.take("mask_prompt", hub.get("mask_prompt", False))
    draft.set("data.train_on", "last_turn" if masked else "all", f"mask_prompt: {bool(masked)}")


def _named(entry: Mapping[str, Any]) -> tuple[str, Any]:
    """A data set of the hub, and its configuration."""
    config = entry.get("config") or {}
    subset = config.get("name") if isinstance(config, Mapping) else None
    return str(entry.get("path") or entry.get("name") or ""), subset


def _convert_valid_split(draft: Draft, name: str, subset: Any, split: Any) -> None:
    if split is None:
        return
    place = draft.hub_place(name, subset, split)
    if place != draft.value_of("data.train"):
        draft.set("data.eval", place, "hf_dataset.valid_split")
    else:
        draft.leave_out("valid_split", split, "it would be measured on what is learnt: "
                        "data.eval_split holds rows of data.train out")  # fmt: skip


def _convert_columns(draft: Draft, hub: Mapping[str, Any]) -> None:
    features = {
        key: draft.take(key, hub.get(key))
        for key in ("prompt_feature", "completion_feature", "text_feature", "chat_feature")
    }
    if features["completion_feature"]:
        columns = {"prompt": features["prompt_feature"] or "prompt",
                   "completion": features["completion_feature"]}  # fmt: skip
        origin = "prompt_feature, completion_feature"
        draft.set_rows(RowsOf.named("prompt/completion", columns, origin))
    elif text := features["text_feature"]:
        draft.set_rows(RowsOf.named("text", {"text": text}, "text_feature"))
    elif chat := features["chat_feature"]:
        draft.set_rows(RowsOf.named("messages", {"messages": chat}, "chat_feature"))


def _convert_loop(draft: Draft) -> None:
    accumulation = draft.take("grad_accumulation_steps", 1)
    draft.set("train.gradient_accumulation_steps", accumulation, "grad_accumulation_steps")
    iters = draft.take("iters", _STEPS)
    steps = max(iters // accumulation, 1)
    draft.set("train.max_steps", steps, "iters" if accumulation == 1 else "iters / accumulation")
    for key, (ours, default) in _STEP_KEYS.items():
        draft.set(ours, max(draft.take(key, default) // accumulation, 1), key)
    _convert_schedule(draft, steps)
    _convert_optimizer(draft)


def _convert_optimizer(draft: Draft) -> None:
    name = str(draft.take("optimizer", "adam")).lower()
    given = draft.take("optimizer_config", {})
    own = given.get(name) if isinstance(given, Mapping) else None
    own = own if isinstance(own, Mapping) else {}
    decay = own.get("weight_decay", 0.01 if name == "adamw" else 0.0)
    draft.set("optim.weight_decay", decay, f"optimizer: {name}")
    trl.set_betas(draft, own, "optimizer_config.betas")
    if "eps" in own:
        draft.set("optim.adam_epsilon", own["eps"], "optimizer_config.eps")
    if name not in ("adam", "adamw"):
        draft.leave_out("optimizer", name, "AdamW trains here; another is not done")
    if not own.get("bias_correction"):
        draft.notes.append(
            f"mlx-lm's {name} does not correct its moments' bias unless optimizer_config says so; "
            "here it is corrected, so that the first steps are smaller"
        )
    _convert_reports(draft)


def _convert_reports(draft: Draft) -> None:
    project, services = draft.take("wandb"), draft.take("report_to", "")
    names = [name.strip() for name in str(services).split(",") if name.strip()]
    if project is not None or "wandb" in names:
        draft.set("log.report_to", ["wandb"], "report_to" if "wandb" in names else "wandb")
    if others := [name for name in names if name != "wandb"]:
        reason = "TensorBoard and Weights & Biases are written to"
        draft.leave_out("report_to", ", ".join(others), reason)


DIALECT = Dialect("mlx-lm", _MARKS, _KEYS, _convert, _DEFAULTS)
