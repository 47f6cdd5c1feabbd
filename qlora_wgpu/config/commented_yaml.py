"""A configuration as a person would write it: sections, and beside a value why it is that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from qlora_wgpu.visible import one_line, visible_json

_COMMENTS_AT = 38  # the column that comments begin in
_PLAIN = frozenset("/._-")

Value = str | bool | int | float | dict[str, str] | list[dict[str, str]]


@dataclass(frozen=True)
class Setting:
    """One line of a configuration.

    Attributes:
        key: Section and key, such as ``"optim.learning_rate"``.
        value: The value.
        why: What it is for, or why it is that; may be empty.
        is_active: Whether it counts; else it is a comment itself, for the user to fill in.
    """

    key: str
    value: Value
    why: str = ""
    is_active: bool = True

    @property
    def section(self) -> str:
        """The section that it belongs to."""
        return self.key.partition(".")[0]

    def line(self) -> str:
        """The line in its section."""
        mark = "" if self.is_active else "# "
        text = f"  {mark}{self.key.partition('.')[2]}: {_yaml_value(self.value)}"
        comment = f"# {one_line(self.why)}" if self.why else ""
        return f"{text:{_COMMENTS_AT - 2}}  {comment}".rstrip()


def commented_yaml(title: str, settings: Sequence[Setting]) -> str:
    """The text of a file.

    Args:
        title: Its first line.
        settings: Its lines; those of a section follow one another.
    """
    parts = [f"# {one_line(title)}"]
    for section, lines in groupby(settings, key=lambda setting: setting.section):
        parts.append("\n".join([f"{section}:", *(line.line() for line in lines)]))
    return parts[0] + "\n" + "\n\n".join(parts[1:]) + "\n"


def _yaml_value(value: Value) -> str:
    """A value as YAML takes it, whatever a text holds."""
    if isinstance(value, list):
        entries = (", ".join(f"{k}: {_yaml_value(v)}" for k, v in each.items()) for each in value)
        return f"[{', '.join(f'{{{entry}}}' for entry in entries)}]"
    if isinstance(value, dict):  # of columns, whose names may be words that mean something else
        return "{" + ", ".join(f"{key}: {visible_json(v)}" for key, v in value.items()) + "}"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        mantissa, _, exponent = f"{value:e}".partition("e")
        short = f"{float(mantissa):g}e{int(exponent)}"
        return short if value and abs(int(exponent)) > 2 else f"{value:g}"
    if isinstance(value, int):
        return str(value)
    is_plain = all(c.isalnum() or c in _PLAIN for c in value) and value[:1] not in "-."
    return value if value and is_plain else visible_json(value)
