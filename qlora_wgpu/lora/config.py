"""adapter_config.json: written as PEFT needs it, read as far as it can be computed here."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from qlora_wgpu.checkpoint.hub import is_hub_name, name_on_hub
from qlora_wgpu.config.yaml import read_json_object
from qlora_wgpu.errors import CheckpointError, ConfigError, UnsupportedModelError, brief
from qlora_wgpu.files import is_dir
from qlora_wgpu.lora.peft_names import BIAS_KINDS
from qlora_wgpu.sandbox.expressions import (
    ANY_PARENT,
    ExpressionError,
    check_expressions,
    first_fitting,
    fits,
)

Number = TypeVar("Number", int, int | float)

# ---- patterns for names of modules -----------------------------------------------------------


def value_for(patterns: Mapping[str, Number], module: str, default: Number) -> Number:
    """The value of the first pattern that fits a module, or the default.

    A pattern fits a whole name or its last parts, with ``^`` the whole name only.
    """
    if not patterns:
        return default
    try:
        place = first_fitting(tuple(map(_below, patterns)), module)
    except ExpressionError as err:
        names = ", ".join(repr(pattern[:80]) for pattern in islice(patterns, 2))
        more = " and more" if len(patterns) > 2 else ""
        raise ConfigError(f"the pattern {names}{more} for names of modules {err}") from err
    return default if place is None else list(patterns.values())[place]


def unfitting(patterns: Iterable[str], modules: Collection[str]) -> list[str]:
    """The patterns that fit none of some modules."""
    return [p for p in patterns if not any(_fits(p, module) for module in modules)]


def _below(pattern: str) -> str:
    """The expression for a pattern with any parent before it, which ^ lets none stand."""
    return rf"{ANY_PARENT}({pattern})"


def _fits(pattern: str, module: str) -> bool:
    try:
        return fits(_below(pattern), module)
    except ExpressionError as err:
        raise ConfigError(f"the pattern {pattern[:80]!r} for names of modules {err}") from err


# ---- the settings ----------------------------------------------------------------------------

TokenIndices = list[int] | dict[str, list[int]]
"""PEFT's trainable_token_indices: rows of the embedding, or rows by the matrices' names."""

_UNUSED: dict[str, Any] = {
    "auto_mapping": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layer_replication": None,
    "layers_pattern": None,
    "loftq_config": {},
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_type": "LORA",
    "revision": None,
}
"""Fields of every PEFT from 0.11 on that say nothing special; newer ones have their defaults.

``fan_in_fan_out`` may be true: of torch's linear layers, which all models here have, PEFT takes it
for false.
"""

_REFUSED = {
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "lora_bias": "a bias on lora_B",
    "layer_replication": "replicated layers",
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
}
"""Fields that change what an adapter computes, with what they stand for; empty or false is fine."""

_KNOWN = {
    "corda_config", "enable_lora", "eva_config", "lora_ga_config", "merge_weights",
    "runtime_config",
}  # fmt: skip
"""Others of any PEFT up to 0.21 that are read, or say nothing of what an adapter computes."""

_STARTS_THAT_KEEP_THE_BASE = (True, False, "gaussian", "eva", "orthogonal", "mica", None)


@dataclass(frozen=True)
class AdapterConfig:
    """The settings that an adapter was trained with, by PEFT's names."""

    r: int  # rank
    lora_alpha: int | float  # numerator of the scaling
    lora_dropout: float  # probability of dropping an input while training
    target_modules: list[str] | str  # names of the adapted layers, or their ends, or a pattern
    use_rslora: bool  # whether the scaling is lora_alpha / sqrt(r) instead of lora_alpha / r
    # The base model as it was named, of the hub with its revision: OWNER/NAME@REVISION.
    base_model_name_or_path: str | None
    rank_pattern: Mapping[str, int] = field(default_factory=dict)  # ranks other than r
    alpha_pattern: Mapping[str, int | float] = field(default_factory=dict)  # other alphas
    layers_to_transform: list[int] | None = None  # the layers that are adapted, if not all
    use_dora: bool = False  # whether each output has a magnitude of its own
    bias: str = "none"  # which of the base's biases were trained: "none", "lora_only" or "all"
    # Names, or their ends, of adapted parameters that hold a layer's experts.
    target_parameters: list[str] | None = None
    # Trained rows of the embedding, or of matrices by name.
    trainable_token_indices: TokenIndices | None = None
    modules_to_save: list[str] | None = None  # names, or their ends, of modules trained whole
    ensure_weight_tying: bool = False  # whether tied ones of these were trained as one
    task_type: str | None = "CAUSAL_LM"  # or "SEQ_CLS", of a reward model or classifier

    def rank_of(self, module: str) -> int:
        """A layer's rank."""
        return value_for(self.rank_pattern, module, self.r)

    def alpha_of(self, module: str) -> int | float:
        """Numerator of a layer's scaling."""
        return value_for(self.alpha_pattern, module, self.lora_alpha)

    def scaling_of(self, module: str) -> float:
        """Factor of a layer's product: alpha / r, or alpha / sqrt(r) (arXiv 2312.03732)."""
        rank = self.rank_of(module)
        return self.alpha_of(module) / (math.sqrt(rank) if self.use_rslora else rank)


def to_json(config: AdapterConfig) -> dict[str, Any]:
    """All fields PEFT needs, sorted by name."""
    fields = _UNUSED | vars(config)
    named, at, revision = (config.base_model_name_or_path or "").partition("@")
    if at and name_on_hub(config.base_model_name_or_path):
        fields |= {"base_model_name_or_path": named, "revision": revision}
    if isinstance(config.target_modules, list):
        fields["target_modules"] = sorted(config.target_modules)
    if config.target_parameters is None:  # of which PEFT knows from 0.17 on
        del fields["target_parameters"]
    if config.trainable_token_indices is None:  # from 0.15 on
        del fields["trainable_token_indices"]
    if not config.ensure_weight_tying:  # which older ones do not know
        del fields["ensure_weight_tying"]
    return dict(sorted(fields.items()))


def read_adapter_config(path: Path, adapted: list[str]) -> AdapterConfig:
    """Reads adapter_config.json and refuses what would be computed wrongly.

    ``adapted`` are the layers that have tensors, for target_modules that are no list of names.
    """
    fields = read_json_object(path)
    _refuse_what_is_not_computed(path, fields)
    r = _number(path, fields, "r")
    if r != int(r):
        raise CheckpointError(f"{path}: r must be an integer, got {r}")
    return AdapterConfig(
        r=int(r),
        lora_alpha=_number(path, fields, "lora_alpha"),
        lora_dropout=_dropout(path, fields),
        target_modules=_target_modules(path, fields, adapted),
        use_rslora=_flag(path, fields, "use_rslora"),
        base_model_name_or_path=_base_model(path, fields),
        rank_pattern=_ranks(path, fields),
        alpha_pattern=_pattern(path, fields, "alpha_pattern"),
        use_dora=bool(fields.get("use_dora")),
        bias=fields.get("bias", "none"),
        target_parameters=_names(path, fields, "target_parameters"),
        trainable_token_indices=_token_indices(path, fields),
        modules_to_save=_names(path, fields, "modules_to_save"),
        ensure_weight_tying=_flag(path, fields, "ensure_weight_tying"),
        task_type=fields.get("task_type"),
    )


def _refuse_what_is_not_computed(path: Path, fields: Mapping[str, Any]) -> None:
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise UnsupportedModelError(f"{path}: peft_type is {brief(kind)}, but only 'LORA' is read")
    task = fields.get("task_type")
    if task not in (None, "CAUSAL_LM", "SEQ_CLS"):
        raise UnsupportedModelError(
            f"{path}: task_type is {brief(task)}, but only 'CAUSAL_LM' and 'SEQ_CLS' are read"
        )
    for key, meaning in _REFUSED.items():
        if fields.get(key):
            raise UnsupportedModelError(
                f"{path}: {key} is {brief(fields[key])}, but there is no support for {meaning}"
            )
    known = {*_UNUSED, *_REFUSED, *_KNOWN, *AdapterConfig.__dataclass_fields__}
    for key, value in fields.items():
        asks = value is True or (key.endswith("_config") and value)
        if asks and key not in known:
            raise UnsupportedModelError(
                f"{path}: {key} is {brief(value)}, which no PEFT up to 0.21 knows, so that it may "
                "change what the adapter computes: merge the adapter with the PEFT that wrote it, "
                f"or take {key} out if it says nothing of that"
            )
    bias = fields.get("bias", "none")
    if bias not in BIAS_KINDS:
        raise UnsupportedModelError(
            f"{path}: bias is {brief(bias)}, but only {', '.join(BIAS_KINDS)} are read"
        )
    start = fields.get("init_lora_weights")
    if start not in _STARTS_THAT_KEEP_THE_BASE:
        raise UnsupportedModelError(
            f"{path}: init_lora_weights is {brief(start)}, which changes the base weights as well; "
            "convert the adapter with PEFT's save_pretrained(path_initial_model_for_weight_"
            "conversion=...)"
        )


def _number(path: Path, fields: Mapping[str, Any], key: str) -> int | float:
    """A number above zero, an integer if it is whole."""
    value: Any = fields.get(key)
    if type(value) not in (int, float) or not 0 < value < 2**31:
        raise CheckpointError(f"{path}: {key} is {brief(value)}, not a number above zero")
    return int(value) if value == int(value) else float(value)


def _dropout(path: Path, fields: Mapping[str, Any]) -> float:
    dropout: Any = fields.get("lora_dropout", 0.0)
    if type(dropout) not in (int, float) or not 0 <= dropout < 1:
        raise CheckpointError(f"{path}: lora_dropout is {brief(dropout)}, not a number from 0 to 1")
    return float(dropout)


def _flag(path: Path, fields: Mapping[str, Any], key: str) -> bool:
    flag = fields.get(key)
    if flag is None:  # as tools write it that know no default
        return False
    if not isinstance(flag, bool):
        raise CheckpointError(f"{path}: {key} is {brief(flag)}, not true or false")
    return flag


def _base_model(path: Path, fields: Mapping[str, Any]) -> str | None:
    name = fields.get("base_model_name_or_path")
    if name is not None and not isinstance(name, str):
        raise CheckpointError(f"{path}: base_model_name_or_path is {brief(name)}, not a name")
    revision = fields.get("revision")
    if name is None or not is_hub_name(name) or revision in (None, "", "main"):
        return name
    return name if is_dir(Path(name)) else f"{name}@{revision}"


def _ranks(path: Path, fields: Mapping[str, Any]) -> dict[str, int]:
    pattern = _pattern(path, fields, "rank_pattern")
    for name, rank in pattern.items():
        if type(rank) is not int:
            raise CheckpointError(
                f"{path}: rank_pattern of {name!r} must be an integer, got {rank!r}"
            )
    return {name: int(rank) for name, rank in pattern.items()}


def _pattern(path: Path, fields: Mapping[str, Any], key: str) -> dict[str, int | float]:
    pattern = fields.get(key) or {}
    if not isinstance(pattern, dict):
        raise CheckpointError(f"{path}: {key} is {brief(pattern)}, not numbers by names")
    numbers = {name: _number(path, pattern, name) for name in pattern}
    try:
        check_expressions(tuple(pattern))
    except ExpressionError as err:
        raise CheckpointError(f"{path}: {key} of {brief(list(pattern))} {err}") from err
    return numbers


def _target_modules(path: Path, fields: Mapping[str, Any], adapted: list[str]) -> list[str]:
    """The list of the file, or if that is a pattern or narrowed down, the layers themselves."""
    targets = fields.get("target_modules")
    layers = fields.get("layers_to_transform")  # 0 is the first layer alone
    # PEFT puts no pair on what is trained whole, whatever the targets are.
    saved = set(_names(path, fields, "modules_to_save") or ())
    twice = isinstance(targets, list) and not saved.isdisjoint(map(str, targets))
    narrowed = twice or layers not in (None, []) or bool(fields.get("exclude_modules"))
    if targets is None or isinstance(targets, str) or narrowed:
        return adapted
    if targets == [] and fields.get("target_parameters"):
        return []
    if (
        not isinstance(targets, list)
        or not targets
        or not all(isinstance(name, str) and name for name in targets)
    ):
        raise CheckpointError(f"{path}: target_modules is {brief(targets)}, not a list of names")
    return sorted(set(targets))


def _names(path: Path, fields: Mapping[str, Any], key: str) -> list[str] | None:
    names = fields.get(key)
    if not names:
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise CheckpointError(f"{path}: {key} is {brief(names)}, not a list of names")
    return sorted(set(names))


def _token_indices(
    path: Path, fields: Mapping[str, Any]
) -> list[int] | dict[str, list[int]] | None:
    given: Any = fields.get("trainable_token_indices")
    if not given:
        return None
    lists = given.values() if isinstance(given, dict) else [given]
    if not all(isinstance(rows, list) and all(map(_is_row, rows)) for rows in lists):
        raise CheckpointError(
            f"{path}: trainable_token_indices is {brief(given)}, not the numbers of tokens, "
            "or such by the names of matrices"
        )
    return given  # type: ignore[no-any-return]


def _is_row(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31
