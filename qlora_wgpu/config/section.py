"""The base of configuration sections: frozen and strict; their problems, and keys' old names."""

from __future__ import annotations

import difflib
import inspect
import os
import re
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    Self,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
)

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from qlora_wgpu.config.names import PEFT_DEFAULTS, key_for, reason_for
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.limits import PROBLEMS_SHOWN

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)

# ---- renamed keys --------------------------------------------------------------------------------

_NEW_NAMES = {"device": {"adapter": "gpu"}}


class RenamedKeyWarning(FutureWarning):
    """A key is set by the name that it used to have."""


def new_names(section: str) -> Mapping[str, str]:
    """The new names of a section's renamed keys, by their old ones."""
    return _NEW_NAMES.get(section, {})


def new_name(section: str, key: str) -> str:
    """The present name of a key; warns if the key was renamed."""
    new = new_names(section).get(key)
    if new is None:
        return key
    warnings.warn(
        f"{section}.{key} was renamed to {section}.{new}; the old name still works",
        RenamedKeyWarning,
        stacklevel=2,
    )
    return new


def with_new_names(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """A section's values by their present names.

    If a key is set by both names, the old one stays and is refused as unknown.
    """
    old = {k for k, new in new_names(section).items() if new not in values}
    return {new_name(section, k) if k in old else k: value for k, value in values.items()}


# ---- problems ------------------------------------------------------------------------------------

_MAX_SHOWN = 60
_WITH_COMMAS = re.compile(r"[+-]?[\d.]*\d,\d[\d.,]*", re.ASCII)

_REQUIREMENTS = {
    "int_type": "must be an integer",
    "int_parsing_size": "must be a smaller integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "finite_number": "must be a finite number",
    "list_type": "must be a list",
    "greater_than": "must be greater than {gt:g}",
    "less_than": "must be less than {lt:g}",
    "value_error": "{error}",
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
    "string_unicode": "must be UTF-8 text (set an environment variable such as LC_ALL=C.UTF-8)",
    **dict.fromkeys(
        ("model_type", "model_attributes_type", "dict_type"), "must be a section of keys"
    ),
}
"""By pydantic's type of an error; placeholders are filled from its context."""


@dataclass(frozen=True)
class Problem:
    """One invalid, unknown or missing key."""

    loc: tuple[str, ...]  # the key, outermost part first: ``("lora", "r")``
    kind: str  # ``"unknown"`` (no such key), ``"missing"`` or ``"value"``
    text: str = ""  # the rest of the sentence, such as ``"must be at least 1, got 0"``

    @property
    def key(self) -> str:
        """The dotted key."""
        return ".".join(self.loc)

    def sentence(self, where: str) -> str:
        """The problem in words; ``where`` is like ``" in run.yaml (line 3)"`` or empty."""
        if self.kind == "unknown":
            return f"unknown key '{self.key}'{where}{self.text}"
        if self.kind == "missing":
            return f"{self.key} is required but is not set{where}"
        return f"{self.key}{where} {self.text}"


def shown(value: Any) -> str:
    """A value as the user wrote it, for messages."""
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
    return f"a value of type {type(value).__name__}"


def in_quotes(text: str) -> str:
    """What was typed, in quotes that it does not contain."""
    quote = next((q for q in ("'", '"') if q not in text), "`")
    return f"{quote}{text}{quote}"


def problems_of(
    err: ValidationError, suggest: Callable[[tuple[str, ...]], str] = lambda loc: ""
) -> list[Problem]:
    """Pydantic's errors as problems; ``suggest`` ends the sentence about an unknown key."""
    problems: list[Problem] = []
    for error in err.errors(include_url=False):
        loc = tuple(str(part)[:80] for part in error["loc"])
        if error["type"] == "extra_forbidden" and (accepted := _peft_default(err, loc)):
            text = f"must be {accepted}, got {shown(error['input'])}"
            problems.append(Problem(loc, "value", f"{text}: no other value is supported"))
        elif error["type"] == "extra_forbidden":
            suggestion = suggest(loc) if len(problems) < PROBLEMS_SHOWN else ""  # it is slow
            problems.append(Problem(loc, "unknown", suggestion))
        elif error["type"] == "missing":
            problems.append(Problem(loc, "missing"))
        else:
            problems.append(Problem(loc, "value", _requirement(error)))
    return problems


def _peft_default(err: ValidationError, loc: tuple[str, ...]) -> str:
    """The value that an argument of PEFT's LoraConfig must have; empty for any other key."""
    section = loc[-2] if len(loc) > 1 else err.title
    if section not in ("lora", "LoraConfig") or loc[-1] not in PEFT_DEFAULTS:
        return ""
    return shown(PEFT_DEFAULTS[loc[-1]][0])


def _requirement(error: Mapping[str, Any]) -> str:
    """One of pydantic's errors as ``must be …, got …``."""
    kind, context = error["type"], error.get("ctx", {})
    if kind in _REQUIREMENTS:
        text = _REQUIREMENTS[kind].format(**context)
    elif kind == "literal_error":
        text = f"must be one of {str(context['expected']).replace(' or ', ', ')}"
    elif kind == "greater_than_equal":
        text = f"must be at least {_number(context['ge'])}"
    elif kind == "less_than_equal":
        text = f"must be at most {_number(context['le'])}"
    else:
        text = f"is not valid ({error['msg']})"
    if text.startswith(("and ", "has ", "cannot ", "requires ")):
        return text  # about another key, too: what the value is does not matter
    return f"{text}, got {shown(error['input'])}{_hint(kind, error['input'])}"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.12g}"


def _hint(kind: str, value: Any) -> str:
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f" (write {int(value)})"
    if kind in ("int_type", "float_type") and isinstance(value, str):
        if _WITH_COMMAS.fullmatch(value.strip()):
            return " (use a decimal point, and no thousands separators)"
        try:
            float(value)
        except ValueError:
            return ""
        return " (write it as a plain number, without quotes)"
    if kind == "string_type" and isinstance(value, (bool, int, float)):
        return " (put it in quotes)"
    return ""


def config_error(sentences: Sequence[str], source: str) -> ConfigError:
    """One error for all problems of ``source``, a file or a class."""
    if len(sentences) == 1:
        return ConfigError(sentences[0])
    lines = "".join(f"\n  - {sentence}" for sentence in sentences[:PROBLEMS_SHOWN])
    more = len(sentences) - PROBLEMS_SHOWN
    rest = f"\n  - and {more} more" if more > 0 else ""
    return ConfigError(f"{source} has {len(sentences)} problems:{lines}{rest}")


# ---- sections ------------------------------------------------------------------------------------

FREE_ON_RESUME = "free on resume"
"""Marks a key or section that may be changed when a run is resumed.

It does not change the result, or what it names is compared by its contents.
"""


@dataclass_transform(kw_only_default=True)  # for checkers, whatever is assigned is a default
class _SectionMeta(ModelMetaclass):
    """Makes a direct call raise ConfigError.

    Only the metaclass can tell a direct call from validation: with an ``__init__`` of our own,
    pydantic would stop at the first invalid section instead of listing all.
    """

    def __dir__(cls) -> list[str]:
        """What ``help`` shows: the settings and the class's own properties, not pydantic's."""
        own = [name for name, value in vars(cls).items() if isinstance(value, property)]
        return sorted([*cls.model_fields, *own])  # type: ignore[attr-defined]

    if not TYPE_CHECKING:  # else a checker would accept any argument

        def __call__(cls, *args: Any, **values: Any) -> Any:
            if args:
                raise ConfigError(f"{cls.__name__} takes keyword arguments only")
            try:
                return super().__call__(**values)
            except ValidationError as err:
                raise _as_config_error(cls, err) from None


def _as_config_error(cls: type[Any], err: ValidationError) -> ConfigError:
    def suggest(loc: tuple[str, ...]) -> str:
        if cls.__name__ == "Config":  # as for a file
            from qlora_wgpu.config.loading import suggest_key  # which imports this module

            return suggest_key(loc)
        if len(loc) != 1:
            return ""
        synonym = (key_for(loc[0]) or ("", ""))[1]
        if synonym not in cls.model_fields and (reason := reason_for(loc[0])):
            return f": {reason}"
        near = difflib.get_close_matches(loc[0], cls.model_fields, n=1)
        likely = [synonym] if synonym in cls.model_fields else near
        return f": did you mean '{likely[0]}'?" if likely else ""

    where = f" in {cls.__name__}"
    return config_error([p.sentence(where) for p in problems_of(err, suggest)], cls.__name__)


class Section(BaseModel, metaclass=_SectionMeta):
    """A frozen group of settings; unknown names and invalid values raise ConfigError."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """Documents each setting, with its type, default and description, for ``help``."""
        parameters, lines = [], [inspect.cleandoc(cls.__doc__ or ""), "", "Args:"]
        for name, field in cls.model_fields.items():
            kind = type_name(field.annotation)
            default: Any = Parameter.empty
            given = "required"
            if field.default_factory is not None:  # a section
                default, given = ..., "optional"
            elif not field.is_required():
                default, given = field.default, f"default {field.default!r}"
            parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default))
            text = f"{name} ({kind}, {given}): {field.description or summary(field.annotation)}"
            lines += textwrap.wrap(text, 100, initial_indent=" " * 4, subsequent_indent=" " * 8)
        cls.__doc__ = "\n".join(lines)
        cls.__signature__ = Signature(parameters)

    @model_validator(mode="before")
    @classmethod
    def _plain_values(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        return {key: plain(value) for key, value in values.items()}

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """Builds the section from a mapping.

        Raises:
            ConfigError: If a key is unknown or a value invalid.
        """
        try:
            return super().model_validate(obj, **options)
        except ValidationError as err:
            raise _as_config_error(cls, err) from None

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with some values changed; unlike in pydantic, the changes are checked.

        Raises:
            ConfigError: If a key is unknown or a value invalid.
        """
        kept = {name: getattr(self, name) for name in type(self).model_fields}
        copied = type(self).model_validate({**kept, **(update or {})})
        return super(Section, copied).model_copy(deep=deep)

    def __setattr__(self, name: str, value: Any) -> None:
        raise ConfigError(
            f"{type(self).__name__}.{name} cannot be changed: "
            f"make a changed copy with model_copy(update={{'{name}': ...}})"
        )

    def __delattr__(self, name: str) -> None:
        raise ConfigError(f"{type(self).__name__}.{name} cannot be deleted")


def summary(section: Any) -> str:
    """A section's description, without its settings."""
    return inspect.cleandoc(section.__doc__ or "").partition("\n\n")[0]


def type_name(kind: Any) -> str:
    """A setting's type as it is written without its constraints, such as ``int | None``."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return type_name(args[0])
    if origin is Literal:
        return " | ".join(map(repr, args))
    if origin in (Union, UnionType):
        return " | ".join(map(type_name, args))
    if args:
        return f"{origin.__name__}[{', '.join(map(type_name, args))}]"
    return "None" if kind is type(None) else str(getattr(kind, "__name__", kind))


def plain(value: Any) -> Any:
    """NumPy scalars as Python's numbers, and paths as text."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value
