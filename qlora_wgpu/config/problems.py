"""Problems of a configuration in words: one sentence each, with the key that was meant."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from qlora_wgpu.config.names import PEFT_DEFAULTS
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.limits import PROBLEMS_SHOWN

# ---- names ---------------------------------------------------------------------------------------

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
    "string_unicode": "must be UTF-8 text (an environment variable such as LC_ALL=C.UTF-8 says so)",
    **dict.fromkeys(
        ("model_type", "model_attributes_type", "dict_type"), "must be a section of keys"
    ),
}
"""By pydantic's type of an error, to be filled in from its context."""


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
    if kind in _REQUIREMENTS:
        return _REQUIREMENTS[kind].format(**context)
    if kind == "literal_error":
        return f"must be one of {str(context['expected']).replace(' or ', ', ')}"
    if kind == "greater_than_equal":
        return f"must be at least {_number(context['ge'])}"
    if kind == "less_than_equal":
        return f"must be at most {_number(context['le'])}"
    return f"is not valid ({error['msg']})"


def problems_of(
    err: ValidationError, suggest: Callable[[tuple[str, ...]], str] = lambda loc: ""
) -> list[Problem]:
    """Pydantic's findings as problems; ``suggest`` ends the sentence about an unknown key."""
    problems: list[Problem] = []
    for error in err.errors(include_url=False):
        loc = tuple(str(part)[:80] for part in error["loc"])
        if error["type"] == "extra_forbidden" and (accepted := _peft_default(err, loc)):
            text = f"must be {accepted}, got {shown(error['input'])}"
            problems.append(Problem(loc, "value", f"{text}: no other value is supported"))
        elif error["type"] == "extra_forbidden":
            meant = suggest(loc) if len(problems) < PROBLEMS_SHOWN else ""  # it takes a while
            problems.append(Problem(loc, "unknown", meant))
        elif error["type"] == "missing":
            problems.append(Problem(loc, "missing"))
        else:
            got = f", got {shown(error['input'])}{_hint(error['type'], error['input'])}"
            problems.append(Problem(loc, "value", _requirement(error) + got))
    return problems


def _peft_default(err: ValidationError, loc: tuple[str, ...]) -> str:
    """The value that an argument of PEFT's LoraConfig must have; empty for any other key."""
    section = loc[-2] if len(loc) > 1 else err.title
    if section not in ("lora", "LoraConfig") or loc[-1] not in PEFT_DEFAULTS:
        return ""
    return shown(PEFT_DEFAULTS[loc[-1]][0])


def config_error(sentences: Sequence[str], source: str) -> ConfigError:
    """One error for all that is wrong with ``source`` (a file's name or a class)."""
    if len(sentences) == 1:
        return ConfigError(sentences[0])
    lines = "".join(f"\n  - {sentence}" for sentence in sentences[:PROBLEMS_SHOWN])
    more = len(sentences) - PROBLEMS_SHOWN
    rest = f"\n  - and {more} more" if more > 0 else ""
    return ConfigError(f"{source} has {len(sentences)} problems:{lines}{rest}")
