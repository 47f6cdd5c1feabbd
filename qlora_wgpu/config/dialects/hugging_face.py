"""Keys of transformers' TrainingArguments, which TRL and LLaMA-Factory share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qlora_wgpu.config.dialects.draft import Defaults, Draft, listed
from qlora_wgpu.config.schedules import ARGUMENTS, check_schedule
from qlora_wgpu.config.values import LOSS, OPTIMIZERS, figures_of

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
    known = figures_of(objective, draft.value_of("train.loss_type"))
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
