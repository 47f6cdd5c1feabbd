"""Types of settings: which values are valid, and the error for those that are not."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    Field,
    PlainValidator,
    TypeAdapter,
    WithJsonSchema,
)

from qlora_wgpu.limits import COUNT, NUMBERS, RANK, STEPS
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

LOSS = "loss"
_ANSWER_METRICS = (
    "rewards/margins", "rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected",
)  # fmt: skip
_PAIR_METRICS = ("rewards/accuracies", *_ANSWER_METRICS)
_METRICS = {
    "sft": (LOSS, "mean_token_accuracy"),
    "dpo": (LOSS, *_PAIR_METRICS, "mean_token_accuracy"),
    "orpo": (LOSS, *_PAIR_METRICS, "nll_loss", "log_odds_ratio", "log_odds_chosen"),
    "kto": (LOSS, *_ANSWER_METRICS),
}


def eval_metrics(objective: str, loss_type: str | None) -> tuple[str, ...]:
    """The metrics of evaluations, without the prefix ``eval_``."""
    metrics = _METRICS[objective]
    return (*metrics, "kl") if objective == "kto" and loss_type in (None, "kto") else metrics


# ---- types ---------------------------------------------------------------------------------------

_TEXT, _NULL = {"type": "string"}, {"type": "null"}  # of JSON Schema
_FRACTION = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}


def _integer_from(minimum: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": minimum}


def _list_of(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


def _any_of(*schemas: Mapping[str, Any]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": list(schemas)})


def _valid_if(is_valid: Callable[[Any], bool], requirement: str) -> PlainValidator:
    """A validator that keeps valid values as they are and raises ``requirement`` for others."""

    def validate(value: Any) -> Any:
        if not is_valid(value):
            raise ValueError(requirement)
        return value

    return PlainValidator(validate)


def _is_integer(value: Any, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= COUNT


def _is_fraction(value: Any) -> bool:
    return isinstance(value, float) and 0.0 < value < 1.0


# Numbers

PositiveInt = Annotated[int, Field(ge=1, le=COUNT)]
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
    int | str, PlainValidator(_memory), _any_of(_TEXT, _integer_from(MIN_WITHOUT_UNIT))
]
AutoOrBool = Annotated[
    bool | Literal["auto"],
    _valid_if(lambda v: v == "auto" or isinstance(v, bool), "must be auto, true or false"),
    WithJsonSchema({"enum": ["auto", True, False]}),
]

# Counts of steps, rows and workers


def _max_steps(value: int) -> int:
    if value != -1 and not 1 <= value <= STEPS:
        raise ValueError(f"must be from 1 to {STEPS:,}, or -1 for no limit")
    return value


MaxSteps = Annotated[int, AfterValidator(_max_steps)]
EvalSteps = Annotated[
    int | float,
    _valid_if(
        lambda v: _is_integer(v, 0) or _is_fraction(v),
        "must be an integer number of steps, a fraction of the run between 0 and 1, or 0 for only "
        "at the end",
    ),
    _any_of(_integer_from(0), _FRACTION),
]
AT_EVALUATIONS = "eval"
SampleSteps = Annotated[
    int | float | str,
    _valid_if(
        lambda v: v == AT_EVALUATIONS or _is_integer(v, 0) or _is_fraction(v),
        "must be an integer number of steps, a fraction of the run between 0 and 1, eval for every "
        "evaluation, or 0 for only before and after training",
    ),
    _any_of(_integer_from(0), _FRACTION, {"const": AT_EVALUATIONS}),
]
EvalSplit = Annotated[
    int | float | None,
    _valid_if(
        lambda v: v is None or _is_integer(v, 1) or _is_fraction(v),
        "must be a fraction between 0 and 1, an integer number of rows, or null for none",
    ),
    _any_of(_integer_from(1), _FRACTION, _NULL),
]
Workers = Annotated[
    int | str,
    _valid_if(
        lambda v: v == "auto" or _is_integer(v, 1),
        "must be auto or a number of workers, at least 1",
    ),
    _any_of(_integer_from(1), {"const": "auto"}),
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
_ADDRESS = re.compile(r"(tls|tcp)://[^\s/]+:[0-9]{1,5}")
Scheduler = Annotated[
    str | None,
    _valid_if(
        lambda v: v in (None, "local") or (isinstance(v, str) and bool(_ADDRESS.fullmatch(v))),
        "must be local, the address of a scheduler such as tls://192.168.1.5:8786, or null for "
        "this process only",
    ),
    _any_of(_TEXT, _NULL),
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


TargetModules = Annotated[
    str | list[str],
    PlainValidator(_target_modules),
    _any_of({"type": "string", "minLength": 1}, _list_of({"type": "string"})),
]


def _are_token_indices(value: Any) -> bool:
    if value is None:
        return True
    lists = list(value.values()) if isinstance(value, dict) else [value]
    named = not isinstance(value, dict) or all(isinstance(name, str) and name for name in value)
    return bool(lists) and named and all(map(_is_list_of_tokens, lists))


def _is_list_of_tokens(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(token) is int and 0 <= token < 2**31 for token in value)
    )


_TOKENS = _list_of(_integer_from(0))

TokenIndices = Annotated[
    list[int] | dict[str, list[int]] | None,
    _valid_if(
        _are_token_indices,
        "must be a list of token ids, a mapping from matrix names to such lists, or null for none",
    ),
    _any_of(
        _TOKENS, {"type": "object", "additionalProperties": _TOKENS, "minProperties": 1}, _NULL
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

OPTIMIZERS = {
    **dict.fromkeys(
        ("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_32bit", "paged_adamw",
         "paged_adamw_32bit"),
        "adamw",
    ),
    **dict.fromkeys(
        ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw8bit", "pagedadamw8bit"),
        "adamw_8bit",
    ),
    **dict.fromkeys(
        ("lion", "lion_32bit", "paged_lion", "paged_lion_32bit", "lion_pytorch"), "lion"
    ),
}  # fmt: skip
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
