"""The base of every configuration section: frozen, strict, and with errors in plain words."""

from __future__ import annotations

import difflib
import inspect
import os
import textwrap
from collections.abc import Mapping
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

from qlora_wgpu.config.names import key_for, reason_for
from qlora_wgpu.config.problems import config_error, problems_of
from qlora_wgpu.errors import ConfigError

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)


class FreeOnResume:
    """Marks a key or a section that may be another one when a run goes on.

    It cannot change what is computed, or what it names is compared by its contents.
    """


FREE_ON_RESUME = FreeOnResume()


@dataclass_transform(kw_only_default=True)  # for checkers, whatever is assigned is a default
class _SectionMeta(ModelMetaclass):
    """Makes a direct call raise ConfigError.

    A call through the metaclass is the only place that sees direct construction alone: with an
    ``__init__`` of our own, pydantic would stop at the first bad section instead of listing all.
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
        if len(loc) != 1:
            return ""
        meant = (key_for(loc[0]) or ("", ""))[1]
        if meant not in cls.model_fields and (reason := reason_for(loc[0])):
            return f": {reason}"
        near = difflib.get_close_matches(loc[0], cls.model_fields, n=1)
        likely = [meant] if meant in cls.model_fields else near
        return f": did you mean '{likely[0]}'?" if likely else ""

    where = f" in {cls.__name__}"
    return config_error([p.sentence(where) for p in problems_of(err, suggest)], cls.__name__)


class Section(BaseModel, metaclass=_SectionMeta):
    """A frozen group of settings; wrong names, types and ranges raise ConfigError."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """Documents each setting, with its type, default and description, for ``help``."""
        parameters, lines = [], [inspect.cleandoc(cls.__doc__ or ""), "", "Args:"]
        for name, field in cls.model_fields.items():
            kind = type_name(field.annotation)
            default: Any = Parameter.empty
            shown = "required"
            if field.default_factory is not None:  # a section
                default, shown = ..., "optional"
            elif not field.is_required():
                default, shown = field.default, f"default {field.default!r}"
            parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default))
            text = f"{name} ({kind}, {shown}): {field.description}"
            lines += textwrap.wrap(text, 100, initial_indent=" " * 4, subsequent_indent=" " * 8)
        cls.__doc__ = "\n".join(lines)
        cls.__signature__ = Signature(parameters)

    @model_validator(mode="before")
    @classmethod
    def _plain_values(cls, values: Any) -> Any:
        """Takes NumPy scalars and paths as the numbers and texts they stand for."""
        if not isinstance(values, Mapping):
            return values
        return {key: plain(value) for key, value in values.items()}

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """Builds the section from a mapping.

        Raises:
            ConfigError: If a key or value is wrong.
        """
        try:
            return super().model_validate(obj, **options)
        except ValidationError as err:
            raise _as_config_error(cls, err) from None

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with some values changed; unlike pydantic's own, the changes are checked.

        Raises:
            ConfigError: If a key or value is wrong.
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
    """A NumPy scalar or a path as the number or text that it stands for."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value
