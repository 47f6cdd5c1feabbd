"""Problems of a configuration in words: one sentence each, with the key that was meant."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from qlora_wgpu.errors import ConfigError
from qlora_wgpu.limits import PROBLEMS_SHOWN

# ---- names ---------------------------------------------------------------------------------------

# Names from other trainers and everyday words, to the key that means the same here.
_SYNONYMS = {
    "model.path": "base_model model_name model_name_or_path model_id model_path name_or_path hub "
    "name id base",
    "quant.scheme": "quantization quant_type bnb_4bit_quant_type load_in_4bit bits method",
    "quant.blocksize": "group_size bnb_4bit_blocksize",
    "quant.double_quant": "bnb_4bit_use_double_quant use_double_quant nested",
    "lora.r": "rank lora_r lora_rank dim",
    "lora.lora_alpha": "alpha",
    "lora.lora_dropout": "dropout",
    "lora.target_modules": "targets modules lora_target_modules target keys",
    "lora.use_rslora": "rslora rank_stabilized",
    "lora.trainable_token_indices": "lora_trainable_token_indices token_indices trainable_tokens",
    "data.train": "dataset train_file train_data train_path path train_dataset datasets",
    "data.eval": "eval_file eval_data validation validation_file valid val val_file test "
    "eval_dataset",
    "data.max_seq_length": "max_length max_len sequence_len sequence_length seq_len seq_length "
    "max_seq_len model_max_length cutoff_len context_length block_size max_tokens",
    "data.chat_template": "template chat_template_path chat_template_jinja",
    "train.num_train_epochs": "epochs num_epochs n_epochs epoch",
    "train.max_steps": "steps iters iterations num_steps total_steps",
    "train.per_device_train_batch_size": "batch_size micro_batch_size train_batch_size "
    "micro_batch minibatch_size",
    "train.gradient_accumulation_steps": "grad_accum gradient_accumulation accumulation_steps "
    "grad_accumulation_steps accumulate_grad_batches grad_accum_steps",
    "train.gradient_checkpointing": "grad_checkpoint checkpointing activation_checkpointing",
    "train.compute_dtype": "dtype torch_dtype precision bf16 fp16 mixed_precision "
    "bnb_4bit_compute_dtype",
    "train.gradient_dtype": "grad_dtype grad_accum_dtype gradient_accumulation_dtype",
    "train.neftune_noise_alpha": "neftune noise_alpha",
    "train.objective": "rl training_type stage trainer",
    "train.beta": "dpo_beta pref_beta rl_beta kto_beta orpo_beta orpo_alpha",
    "train.desirable_weight": "kto_desirable_weight",
    "train.undesirable_weight": "kto_undesirable_weight",
    "train.z_loss_weight": "z_loss",
    "train.router_aux_loss_coef": "moe_aux_loss_coef aux_loss_coef output_router_logits",
    "optim.loraplus_lr_ratio": "lora_plus loraplus",
    "lora.init_from": "lora_model_dir resume_adapter_file init_adapter",
    "data.packing": "sample_packing pack",
    "data.train_on": "train_on_inputs mask_prompt train_on_responses_only roles_to_train",
    "data.columns": "column_mapping field_mapping",
    "eval.load_best_model_at_end": "load_best save_best",
    "eval.metric_for_best_model": "best_metric metric_for_best early_stopping_metric",
    "eval.early_stopping_patience": "early_stopping patience",
    "train.seed": "random_seed random_state",
    "optim.name": "optimizer optim optimizer_type optimizer_name",
    "optim.learning_rate": "lr max_lr",
    "optim.lr_scheduler_type": "scheduler lr_scheduler schedule lr_schedule scheduler_type",
    "optim.lr_scheduler_kwargs": "scheduler_kwargs scheduler_args lr_scheduler_args",
    "optim.warmup_ratio": "warmup warm_up",
    "optim.weight_decay": "wd decay",
    "optim.max_grad_norm": "grad_clip gradient_clipping clip clip_grad_norm max_norm clip_norm",
    "optim.adam_beta1": "beta1 beta_1",
    "optim.adam_beta2": "beta2 beta_2",
    "optim.adam_epsilon": "eps epsilon adam_eps",
    "eval.eval_steps": "steps_per_eval eval_every eval_interval eval_freq",
    "log.logging_steps": "log_every log_interval log_steps steps_per_report report_every",
    "output.dir": "output_dir out out_dir save_dir folder output_path adapter_path",
    "output.save_steps": "save_every save_interval checkpoint_every checkpoint_steps",
    "output.save_total_limit": "keep keep_last max_checkpoints",
    "device.gpu": "device device_name gpu_id",
    "device.backend": "webgpu implementation library",
}
KEY_OF = {word: tuple(key.split(".")) for key, words in _SYNONYMS.items() for word in words.split()}


_NEW_NAMES = {"device": {"adapter": "gpu"}}


class RenamedKeyWarning(FutureWarning):
    """A key is written under the name that it used to have."""


def new_names(section: str) -> Mapping[str, str]:
    """The new names of a section's keys by their old ones."""
    return _NEW_NAMES.get(section, {})


def new_name(section: str, key: str) -> str:
    """The present name of a key; warns where that is another one."""
    new = new_names(section).get(key)
    if new is None:
        return key
    warnings.warn(
        f"{section}.{key} is now called {section}.{new}; the old name is still read",
        RenamedKeyWarning,
        stacklevel=2,
    )
    return new


def with_new_names(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """A section's values under the names that keys have now.

    Where both names are given, the old one is left, to be refused as unknown.
    """
    old = {k for k, new in new_names(section).items() if new not in values}
    return {new_name(section, k) if k in old else k: value for k, value in values.items()}


# ---- problems ------------------------------------------------------------------------------------

_MAX_SHOWN = 60
_WITH_COMMAS = re.compile(r"[+-]?[\d.]*\d,\d[\d.,]*", re.ASCII)

_TYPE_WORDS = {
    "int_type": "must be an integer",
    "int_parsing_size": "must be a smaller integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "finite_number": "must be a finite number",
    "list_type": "must be a list",
}


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong."""

    loc: tuple[str, ...]  # the key, outermost part first: ``("lora", "r")``
    kind: str  # ``"unknown"`` (no such key), ``"missing"`` or ``"value"``
    text: str = ""  # the rest of the sentence, such as ``"must be at least 1, got 0"``

    @property
    def key(self) -> str:
        """The dotted key."""
        return ".".join(self.loc)

    def sentence(self, where: str) -> str:
        """Renders the problem; ``where`` is like ``" in run.yaml (line 3)"`` or empty."""
        if self.kind == "unknown":
            return f"unknown key '{self.key}'{where}{self.text}"
        if self.kind == "missing":
            return f"{self.key} is required but is not set{where}"
        return f"{self.key}{where} {self.text}"


def shown(value: Any) -> str:
    """A value as a user would recognise it in a message."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        text = "{" + ", ".join(f"{key}: {shown(item)}" for key, item in value.items()) + "}"
        return text if len(text) <= _MAX_SHOWN else "a mapping"
    if isinstance(value, (str, int, float, list, tuple)):
        try:
            text = repr(value)
        except ValueError:  # an integer of more digits than Python prints
            return "a huge integer"
        return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."
    return f"a {type(value).__name__}"


def in_quotes(text: str) -> str:
    """What was typed, in quotes that it does not have itself."""
    quote = next((q for q in ("'", '"') if q not in text), "`")
    return f"{quote}{text}{quote}"


def _hint(kind: str, value: Any) -> str:
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f" (write {int(value)})"
    if kind in ("int_type", "float_type") and isinstance(value, str):
        if _WITH_COMMAS.fullmatch(value.strip()):
            return " (write fractions with a point, and thousands with nothing between)"
        try:
            float(value)
        except ValueError:
            return ""
        return " (write it as a plain number, without quotes)"
    if kind == "string_type" and isinstance(value, (bool, int, float)):
        return " (put it in quotes)"
    return ""


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.12g}"


def _requirement(error: Mapping[str, Any]) -> str:
    """The "must be ..." part for one of pydantic's errors."""
    kind, context = error["type"], error.get("ctx", {})
    if kind in _TYPE_WORDS:
        return _TYPE_WORDS[kind]
    if kind == "literal_error":
        return f"must be one of {str(context['expected']).replace(' or ', ', ')}"
    if kind == "greater_than":
        return f"must be greater than {context['gt']:g}"
    if kind == "greater_than_equal":
        return f"must be at least {_number(context['ge'])}"
    if kind == "less_than":
        return f"must be less than {context['lt']:g}"
    if kind == "less_than_equal":
        return f"must be at most {_number(context['le'])}"
    if kind == "value_error":
        return str(context["error"])
    if kind in ("string_too_short", "too_short"):
        return "must not be empty"
    if kind == "string_unicode":
        return "must be UTF-8 text (an environment variable such as LC_ALL=C.UTF-8 says so)"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return "must be a section of keys"
    return f"is not valid ({error['msg']})"


def problems_of(
    err: ValidationError, suggest: Callable[[tuple[str, ...]], str] = lambda loc: ""
) -> list[Problem]:
    """Turns pydantic's findings into problems, in the order of the fields.

    Args:
        err: The error that pydantic raised.
        suggest: Gives the end of the sentence for an unknown key, like ``": did you mean 'r'?"``.
    """
    problems: list[Problem] = []
    for error in err.errors(include_url=False):
        loc = tuple(str(part)[:80] for part in error["loc"])
        if error["type"] == "extra_forbidden":
            meant = suggest(loc) if len(problems) < PROBLEMS_SHOWN else ""  # it takes a while
            problems.append(Problem(loc, "unknown", meant))
        elif error["type"] == "missing":
            problems.append(Problem(loc, "missing"))
        else:
            got = f", got {shown(error['input'])}{_hint(error['type'], error['input'])}"
            problems.append(Problem(loc, "value", _requirement(error) + got))
    return problems


def config_error(sentences: Sequence[str], source: str) -> ConfigError:
    """One error for all that is wrong with ``source`` (a file's name or a class)."""
    if len(sentences) == 1:
        return ConfigError(sentences[0])
    lines = "".join(f"\n  - {sentence}" for sentence in sentences[:PROBLEMS_SHOWN])
    more = len(sentences) - PROBLEMS_SHOWN
    rest = f"\n  - and {more} more" if more > 0 else ""
    return ConfigError(f"{source} has {len(sentences)} problems:{lines}{rest}")
