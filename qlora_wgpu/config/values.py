"""Types of values: what a key of the schema may hold, and the sentence for what it may not."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
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
LEAST_ALONE = 1024
"""Bytes that a number without a unit may be: below it, a unit was forgotten."""


def parse_bytes(text: str) -> int | None:
    """A size in bytes: ``8GiB`` and ``8Gi`` are 8 · 2^30, ``8GB`` and ``8G`` 8 · 10^9, or None.

    A number alone counts bytes, and is none below ``LEAST_ALONE``.
    """
    # Pydantic alone would take "8GiB or so" and "8Gbit".
    size = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    if size is None:
        return None
    if size[0].strip().isdigit() and int(size[0]) < LEAST_ALONE:
        return None
    return int(_BYTE_SIZE.validate_python(f"{size[1]}{size[2] or ''}b"))


# ---- figures of evaluations ----------------------------------------------------------------------

LOSS = "loss"
_ANSWERS = (
    "rewards/margins", "rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected",
)  # fmt: skip
_PAIRS = ("rewards/accuracies", *_ANSWERS)
_OF_OBJECTIVES = {
    "sft": (LOSS, "mean_token_accuracy"),
    "dpo": (LOSS, *_PAIRS, "mean_token_accuracy"),
    "orpo": (LOSS, *_PAIRS, "nll_loss", "log_odds_ratio", "log_odds_chosen"),
    "kto": (LOSS, *_ANSWERS),
}


def figures_of(objective: str, loss_type: str | None) -> tuple[str, ...]:
    """The figures of evaluations, without the ``eval_`` in front of their names."""
    own = _OF_OBJECTIVES[objective]
    has_divergence = objective == "kto" and loss_type in (None, "kto")
    return (*own, "kl") if has_divergence else own


# ---- types ---------------------------------------------------------------------------------------

_TEXT, _NULL = {"type": "string"}, {"type": "null"}  # in JSON's schema
_SHARE = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}


def _whole_from(least: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": least}


def _list_of(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


def _any_of(*schemas: Mapping[str, Any]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": list(schemas)})


ALL_LINEAR = "all-linear"
_ON_WINDOWS = os.name == "nt"
_CONTROL = re.compile(r"[\x00-\x1f]")  # which names on Windows do not have, and elsewhere may
_WORD = re.compile(r"\w*")  # as a regular expression it would fit no whole name

PositiveInt = Annotated[int, Field(ge=1, le=COUNT)]
Rank = Annotated[int, Field(ge=1, le=RANK)]
Text = Annotated[str, Field(min_length=1)]


def _file_name(value: str) -> str:
    """Refuses what no file can be called on this system, or where names are not in UTF-8."""
    if _ON_WINDOWS and (found := _CONTROL.search(value)):
        raise ValueError(
            f"must be a name that files can have, without the control character "
            f"U+{ord(found[0]):04X} (double quotes make one of a backslash and a letter: write "
            "the path in single quotes, or with /)"
        )
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        raise ValueError(
            "must be a name that files can have in this locale (an environment variable such as "
            "LC_ALL=C.UTF-8 says that names are UTF-8)"
        ) from None
    return value


FileName = Annotated[str, Field(min_length=1), AfterValidator(_file_name)]


def _in_float32(value: float) -> float:
    """Refuses what the device would take for zero or infinity."""
    least, most = NUMBERS
    if value != 0 and not least <= abs(value) <= most:
        raise ValueError(f"must be 0 or from {least:g} to {most:g}")
    return value


Float = Annotated[float, AfterValidator(_in_float32)]


Figure = Annotated[
    str, Field(min_length=1), AfterValidator(lambda name: name.removeprefix("eval_"))
]
"""The name of what an evaluation gives, which transformers takes with and without ``eval_``."""


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
            "regular expression of whole names"
        )
    if not all(isinstance(name, str) and name for name in value):
        raise ValueError("must list module names as text")
    if len(set(value)) != len(value):
        raise ValueError("must not name a module twice")
    return list(value)


TargetModules = Annotated[
    str | list[str],
    PlainValidator(_target_modules),
    _any_of({"type": "string", "minLength": 1}, _list_of({"type": "string"})),
]


def _token_indices(value: Any) -> list[int] | dict[str, list[int]] | None:
    if value is None:
        return None
    lists = list(value.values()) if isinstance(value, dict) else [value]
    named = not isinstance(value, dict) or all(isinstance(name, str) and name for name in value)
    if not lists or not named or not all(map(_is_list_of_tokens, lists)):
        raise ValueError(
            "must be a list of tokens' numbers from 0 on, such lists by the names of matrices, or "
            "null for none"
        )
    return value  # type: ignore[no-any-return]


def _is_list_of_tokens(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(token) is int and 0 <= token < 2**31 for token in value)
    )


_TOKENS = _list_of(_whole_from(0))

TokenIndices = Annotated[
    list[int] | dict[str, list[int]] | None,
    PlainValidator(_token_indices),
    _any_of(
        _TOKENS, {"type": "object", "additionalProperties": _TOKENS, "minProperties": 1}, _NULL
    ),
]


def _memory(value: Any) -> int | str:
    if value == "auto":
        return "auto"
    size = parse_bytes(value) if isinstance(value, str) else value
    least = 1 if isinstance(value, str) else LEAST_ALONE
    if isinstance(size, bool) or not isinstance(size, int) or size < least:
        raise ValueError("must be auto, a size such as 8GiB or 8GB, or a number of bytes")
    return value  # type: ignore[no-any-return]


# It stays as it was written; ``parse_bytes`` reads it.
MemorySize = Annotated[int | str, PlainValidator(_memory), _any_of(_TEXT, _whole_from(LEAST_ALONE))]


def _auto_or_bool(value: Any) -> bool | Literal["auto"]:
    if value == "auto" or isinstance(value, bool):
        return value  # type: ignore[no-any-return]
    raise ValueError("must be auto, true or false")


AutoOrBool = Annotated[
    bool | Literal["auto"],
    PlainValidator(_auto_or_bool),
    WithJsonSchema({"enum": ["auto", True, False]}),
]


def _positive_number(value: Any) -> int | float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not value > 0:
        raise ValueError("must be a number above 0")
    if not NUMBERS[0] <= value <= NUMBERS[1]:  # what the device would take for zero or infinity
        raise ValueError(f"must be from {NUMBERS[0]:g} to {NUMBERS[1]:g}")
    return value  # type: ignore[no-any-return]


PositiveNumber = Annotated[
    int | float,
    PlainValidator(_positive_number),
    WithJsonSchema({"type": "number", "exclusiveMinimum": 0}),
]


_STARTS = "default, gaussian, pissa, pissa_niter_N with a number N, or olora"
_NO_STARTS = ("loftq", "eva", "corda", "orthogonal", "lora_ga", "mica")


def _init_lora_weights(value: Any) -> str:
    if value is True:  # as PEFT calls it
        return "default"
    if value in _NO_STARTS:
        raise ValueError(
            f"is not computed here: {value!r} is a start that PEFT makes; choose {_STARTS}"
        )
    known = value in ("default", "gaussian", "pissa", "olora")
    if not known and not (
        isinstance(value, str) and re.fullmatch(r"pissa_niter_[0-9]{1,2}", value)
    ):
        raise ValueError(f"must be {_STARTS}")
    return str(value)


InitLoraWeights = Annotated[
    str, PlainValidator(_init_lora_weights), WithJsonSchema({"type": "string"})
]


def _max_steps(value: int) -> int:
    if value != -1 and not 1 <= value <= STEPS:
        raise ValueError(f"must be from 1 to {STEPS:,}, or -1 for no limit")
    return value


MaxSteps = Annotated[int, AfterValidator(_max_steps)]


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= COUNT


def _is_share(value: Any) -> bool:
    return isinstance(value, float) and 0.0 < value < 1.0


def _eval_steps(value: Any) -> int | float:
    if _is_whole(value, 0) or _is_share(value):
        return value  # type: ignore[no-any-return]
    raise ValueError(
        "must be a whole number of steps, a fraction of the run between 0 and 1, "
        "or 0 for the end only"
    )


EvalSteps = Annotated[int | float, PlainValidator(_eval_steps), _any_of(_whole_from(0), _SHARE)]
AT_EVALUATIONS = "eval"


def _sample_steps(value: Any) -> int | float | str:
    if value == AT_EVALUATIONS or _is_whole(value, 0) or _is_share(value):
        return value  # type: ignore[no-any-return]
    raise ValueError(
        "must be a whole number of steps, a fraction of the run between 0 and 1, eval for "
        "each evaluation, or 0 for before and after alone"
    )


SampleSteps = Annotated[
    int | float | str,
    PlainValidator(_sample_steps),
    _any_of(_whole_from(0), _SHARE, {"const": AT_EVALUATIONS}),
]
_ADDRESS = re.compile(r"(tls|tcp)://[^\s/]+:[0-9]{1,5}")


def _scheduler(value: Any) -> str | None:
    if value in (None, "local") or (isinstance(value, str) and _ADDRESS.fullmatch(value)):
        return value  # type: ignore[no-any-return]
    raise ValueError(
        "must be local, the address of a scheduler such as tls://192.168.1.5:8786, or null for "
        "this process alone"
    )


Scheduler = Annotated[str | None, PlainValidator(_scheduler), _any_of(_TEXT, _NULL)]


def _workers(value: Any) -> int | str:
    if _is_whole(value, 1) or value == "auto":
        return value  # type: ignore[no-any-return]
    raise ValueError("must be a number of workers from 1 on, or auto")


Workers = Annotated[int | str, PlainValidator(_workers), _any_of(_whole_from(1), {"const": "auto"})]


def _eval_split(value: Any) -> int | float | None:
    if value is None or _is_whole(value, 1) or _is_share(value):
        return value  # type: ignore[no-any-return]
    raise ValueError("must be a share between 0 and 1, a whole number of rows, or null for none")


EvalSplit = Annotated[
    int | float | None, PlainValidator(_eval_split), _any_of(_whole_from(1), _SHARE, _NULL)
]


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
"""Other trainers' names for an optimizer, by what it keeps: paging changes no number."""


def _optimizer(value: Any) -> Any:
    if isinstance(value, str) and value.lower() in ("lion_8bit", "paged_lion_8bit", "lion8bit"):
        raise ValueError("is not done in 8 bits: lion keeps its one moment in 32")
    return OPTIMIZERS.get(value.lower(), value) if isinstance(value, str) else value


OptimizerName = Annotated[Literal["adamw", "adamw_8bit", "lion"], BeforeValidator(_optimizer)]


ScheduleName = Literal[
    "constant", "linear", "cosine", "constant_with_warmup", "cosine_with_restarts",
    "cosine_with_min_lr", "cosine_warmup_with_min_lr", "polynomial", "inverse_sqrt",
    "warmup_stable_decay", "reduce_lr_on_plateau",
]  # fmt: skip


def _loss_type(value: Any) -> Any:
    """Takes a list of one, as TRL's DPO has it."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


LossType = Annotated[Text | None, BeforeValidator(_loss_type)]


_FORMAT_NAMES = {
    "sharegpt": "conversations",
    "alpaca": "instruction/output",
    "openai": "messages",
    "chat_template": "messages",
}


def _row_format(value: Any) -> Any:
    """Takes the names that other trainers have for formats."""
    return _FORMAT_NAMES.get(value, value) if isinstance(value, str) else value


RowFormat = Annotated[
    Literal["auto", "messages", "conversations", "prompt/completion", "instruction/output", "text"],
    BeforeValidator(_row_format),
]


def _gpu(value: Any) -> Any:
    """Takes an index written as a number, as `doctor` prints it."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return str(value)
    return value


GpuName = Annotated[Text, BeforeValidator(_gpu)]


def _not_float(value: Any) -> Any:
    """Refuses 64.0, which equals one of the choices but is no integer."""
    if isinstance(value, float):
        raise ValueError("must be an integer")
    return value


Blocksize = Annotated[Literal[32, 64, 128, 256, 512, 1024, 2048, 4096], BeforeValidator(_not_float)]
