"""Types of settings: which values are valid, and the error for those that are not."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)

from qlora_wgpu.limits import CLASSES, COUNT, NUMBERS, RANK, STEPS
from qlora_wgpu.sandbox.expressions import check_expression

# ---- sizes in bytes ------------------------------------------------------------------------------

_BYTE_SIZE = TypeAdapter(ByteSize)
MIN_WITHOUT_UNIT = 1024
"""Minimum size as a number without a unit; below it, a unit was forgotten."""


def parse_bytes(text: str) -> int | None:
    """A size in bytes: ``8GiB`` and ``8Gi`` are 8 · 2^30, ``8GB`` and ``8G`` 8 · 10^9.

    A number without a unit counts bytes. None for everything else.
    """
    # Pydantic alone would take "8GiB or so" and "8Gbit".
    size = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    if size is None:
        return None
    if size[0].strip().isdigit() and int(size[0]) < MIN_WITHOUT_UNIT:
        return None
    return int(_BYTE_SIZE.validate_python(f"{size[1]}{size[2] or ''}b"))


# ---- metrics of evaluations ----------------------------------------------------------------------

LOSS, REWARD = "loss", "reward"
_ANSWER_METRICS = (
    "rewards/margins", "rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected",
)  # fmt: skip
_PAIR_METRICS = ("rewards/accuracies", *_ANSWER_METRICS)
_METRICS = {
    "sft": (LOSS, "mean_token_accuracy"),
    "dpo": (LOSS, *_PAIR_METRICS, "mean_token_accuracy"),
    "orpo": (LOSS, *_PAIR_METRICS, "nll_loss", "log_odds_ratio", "log_odds_chosen"),
    "kto": (LOSS, *_ANSWER_METRICS),
    "grpo": (REWARD,),
    "rloo": (REWARD,),
    "reward": (LOSS, "accuracy", "margin", "mean_reward", "min_reward", "max_reward"),
    "classification": (LOSS, "accuracy", "macro_f1"),
}


def eval_metrics(
    objective: str, loss_type: str | None, problem_type: str = "single_label_classification"
) -> tuple[str, ...]:
    """The metrics of evaluations, without the prefix ``eval_``."""
    if objective == "classification" and problem_type == "regression":
        return (LOSS, "mae")
    metrics = _METRICS[objective]
    return (*metrics, "kl") if objective == "kto" and loss_type in (None, "kto") else metrics


# ---- types ---------------------------------------------------------------------------------------


def _or_else(requirement: str) -> WrapValidator:
    """Replaces the errors of a union's members by a single one."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(requirement) from None

    return WrapValidator(validate)


# Numbers


def _names(value: Any) -> list[str] | None:
    """Names of labels; numbers become their text."""
    if value is None:
        return None
    if not isinstance(value, list) or not value:
        raise ValueError("must be a list of names, such as [negative, positive]")
    if not all(isinstance(each, str | int) and str(each).strip() for each in value):
        raise ValueError("must have a name for each label")
    names = [str(each).strip() for each in value]
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ValueError(f"has {twice[0]!r} twice")
    if len(names) > CLASSES:
        raise ValueError(f"must have at most {CLASSES:,} labels, got {len(names):,}")
    return names


Labels = Annotated[
    list[str] | None,
    PlainValidator(_names),
    WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]}),
]
PositiveInt = Annotated[int, Field(ge=1, le=COUNT)]
_Count = Annotated[int, Field(ge=0, le=COUNT)]
_Fraction = Annotated[float, Field(gt=0.0, lt=1.0)]
Rank = Annotated[int, Field(ge=1, le=RANK)]


def _in_float32(value: float) -> float:
    """Refuses numbers that float32 on the device would round to zero or infinity."""
    low, high = NUMBERS
    if value != 0 and not low <= abs(value) <= high:
        raise ValueError(f"must be 0 or from {low:g} to {high:g}")
    return value


Float = Annotated[float, AfterValidator(_in_float32)]


def _positive_number(value: Any) -> int | float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not value > 0:
        raise ValueError("must be a number above 0")
    if not NUMBERS[0] <= value <= NUMBERS[1]:
        raise ValueError(f"must be from {NUMBERS[0]:g} to {NUMBERS[1]:g}")
    return value  # type: ignore[no-any-return]


PositiveNumber = Annotated[
    int | float,
    PlainValidator(_positive_number),
    WithJsonSchema({"type": "number", "exclusiveMinimum": 0}),
]


def _not_float(value: Any) -> Any:
    """Refuses 64.0, which equals one of the choices but is no integer."""
    if isinstance(value, float):
        raise ValueError("must be an integer")
    return value


Blocksize = Annotated[Literal[32, 64, 128, 256, 512, 1024, 2048, 4096], BeforeValidator(_not_float)]


def _memory(value: Any) -> int | str:
    if value == "auto":
        return "auto"
    size = parse_bytes(value) if isinstance(value, str) else value
    minimum = 1 if isinstance(value, str) else MIN_WITHOUT_UNIT
    if isinstance(size, bool) or not isinstance(size, int) or size < minimum:
        raise ValueError("must be auto, a size such as 8GiB or 8GB, or a number of bytes")
    return value  # type: ignore[no-any-return]


# It stays as it was written; ``parse_bytes`` reads it.
MemorySize = Annotated[
    int | str,
    PlainValidator(_memory),
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": MIN_WITHOUT_UNIT}]}
    ),
]
AutoOrBool = Annotated[bool | Literal["auto"], _or_else("must be auto, true or false")]

# Counts of steps, rows and workers


def _max_steps(value: int) -> int:
    if value != -1 and not 1 <= value <= STEPS:
        raise ValueError(f"must be from 1 to {STEPS:,}, or -1 for no limit")
    return value


MaxSteps = Annotated[int, AfterValidator(_max_steps)]
EvalSteps = Annotated[
    _Count | _Fraction,
    _or_else(
        "must be an integer number of steps, a fraction of the run between 0 and 1, or 0 for only "
        "at the end"
    ),
]
AT_EVALUATIONS: Literal["eval"] = "eval"
SampleSteps = Annotated[
    _Count | _Fraction | Literal["eval"],
    _or_else(
        "must be an integer number of steps, a fraction of the run between 0 and 1, eval for every "
        "evaluation, or 0 for only before and after training"
    ),
]
EvalSplit = Annotated[
    PositiveInt | _Fraction | None,
    _or_else("must be a fraction between 0 and 1, an integer number of rows, or null for none"),
]
Workers = Annotated[
    PositiveInt | Literal["auto"], _or_else("must be auto or a number of workers, at least 1")
]

# Names and text

Text = Annotated[str, Field(min_length=1)]
_ON_WINDOWS = os.name == "nt"
_CONTROL = re.compile(r"[\x00-\x1f]")  # which names on Windows do not have, and elsewhere may


def _file_name(value: str) -> str:
    """Refuses names that no file of this system, or of a locale without UTF-8, can have."""
    if _ON_WINDOWS and (found := _CONTROL.search(value)):
        raise ValueError(
            f"must be a valid file name, without the control character U+{ord(found[0]):04X} "
            "(double quotes make one of a backslash and a letter: write the path in single quotes, "
            "or with /)"
        )
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        raise ValueError(
            "must be a valid file name in this locale (set an environment variable such as "
            "LC_ALL=C.UTF-8 for names in UTF-8)"
        ) from None
    return value


FileName = Annotated[str, Field(min_length=1), AfterValidator(_file_name)]
MetricName = Annotated[
    str, Field(min_length=1), AfterValidator(lambda name: name.removeprefix("eval_"))
]
"""A metric of evaluations, which transformers accepts with and without ``eval_``."""
Scheduler = Annotated[
    Annotated[str, Field(pattern=r"^(local|(tls|tcp)://[^\s/]+:[0-9]{1,5})$")] | None,
    _or_else(
        "must be local, the address of a scheduler such as tls://192.168.1.5:8786, or null for "
        "this process only"
    ),
]


def _gpu(value: Any) -> Any:
    """Takes an index written as a number, as `doctor` prints it."""
    is_index = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return str(value) if is_index else value


GpuName = Annotated[Text, BeforeValidator(_gpu)]

# Modules and tokens

ALL_LINEAR = "all-linear"
_WORD = re.compile(r"\w*")  # as a regular expression it would match no module's whole name


def _regular_expression(value: str) -> str:
    check_expression(value)
    return value


Pattern = Annotated[str, Field(min_length=1), AfterValidator(_regular_expression)]


def _target_modules(value: Any) -> str | list[str]:
    if isinstance(value, str) and (value == ALL_LINEAR or not _WORD.fullmatch(value)):
        return _regular_expression(value)
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=str)
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(
            f"must be {ALL_LINEAR!r}, a list of module names such as [q_proj, v_proj], or a "
            "regular expression that matches whole names"
        )
    if not all(isinstance(name, str) and name for name in value):
        raise ValueError("must be a list of module names as text")
    if len(set(value)) != len(value):
        raise ValueError("must not name a module twice")
    return list(value)


_NAMES = {"type": "array", "items": {"type": "string"}, "minItems": 1}
TargetModules = Annotated[
    str | list[str],
    PlainValidator(_target_modules),
    WithJsonSchema({"anyOf": [{"type": "string", "minLength": 1}, _NAMES]}),
]
_TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]
TokenIndices = Annotated[
    _TokenIds | Annotated[dict[Text, _TokenIds], Field(min_length=1)] | None,
    _or_else(
        "must be a list of token ids, a mapping from matrix names to such lists, or null for none"
    ),
]

_INITIALIZERS = "default, gaussian, pissa, pissa_niter_N with an integer N, or olora"
_INITIALIZER = re.compile(r"default|gaussian|pissa|olora|pissa_niter_[0-9]{1,2}")


def _init_lora_weights(value: Any) -> str:
    if value is True:  # PEFT's default
        return "default"
    if not isinstance(value, str) or not _INITIALIZER.fullmatch(value):
        raise ValueError(f"must be {_INITIALIZERS}")
    return str(value)


InitLoraWeights = Annotated[
    str, PlainValidator(_init_lora_weights), WithJsonSchema({"type": "string"})
]

# Choices that other trainers name differently

_OPTIMIZER_NAMES = {
    "adamw": (
        "adamw adamw_torch adamw_torch_fused adamw_hf adamw_32bit paged_adamw paged_adamw_32bit"
    ),
    "adamw_8bit": "adamw_8bit adamw_bnb_8bit paged_adamw_8bit adamw8bit pagedadamw8bit",
    "lion": "lion lion_32bit paged_lion paged_lion_32bit lion_pytorch",
}
OPTIMIZERS = {name: ours for ours, names in _OPTIMIZER_NAMES.items() for name in names.split()}
"""Our optimizers by other trainers' names; paging does not change the result."""


def _optimizer(value: Any) -> Any:
    if isinstance(value, str) and value.lower() in ("lion_8bit", "paged_lion_8bit", "lion8bit"):
        raise ValueError("must be lion: 8-bit Lion is not supported (its one moment is float32)")
    return OPTIMIZERS.get(value.lower(), value) if isinstance(value, str) else value


OptimizerName = Annotated[Literal["adamw", "adamw_8bit", "lion"], BeforeValidator(_optimizer)]
ScheduleName = Literal[
    "constant", "linear", "cosine", "constant_with_warmup", "cosine_with_restarts",
    "cosine_with_min_lr", "cosine_warmup_with_min_lr", "polynomial", "inverse_sqrt",
    "warmup_stable_decay", "reduce_lr_on_plateau",
]  # fmt: skip


# A list of one loss is TRL's form.
LossType = Annotated[
    Text | None, BeforeValidator(lambda v: v[0] if isinstance(v, list) and len(v) == 1 else v)
]
_FORMAT_NAMES = {
    "sharegpt": "conversations",
    "alpaca": "instruction/output",
    "openai": "messages",
    "chat_template": "messages",
}


RowFormat = Annotated[
    Literal["auto", "messages", "conversations", "prompt/completion", "instruction/output", "text"],
    BeforeValidator(lambda v: _FORMAT_NAMES.get(v, v) if isinstance(v, str) else v),
]
