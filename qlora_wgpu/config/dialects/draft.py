"""A configuration in the making from another trainer's file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qlora_wgpu.config.names import reason_for
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.presence import exists

NumLayers = Callable[[str], int | None]
"""Number of a model's layers by its name, where it is known."""


@dataclass(frozen=True)
class Taken:
    """A value of ours and where it comes from."""

    value: Any  # as the schema takes it
    origin: str  # their key, or why the value stands there


@dataclass(frozen=True)
class LeftOut:
    """A key of theirs that is not taken over."""

    key: str  # theirs, with the value
    reason: str  # why


@dataclass
class Draft:
    """What has been made of a file, and what is left of it."""

    theirs: dict[str, Any]  # their keys that have not been looked at yet
    file: Path  # the file
    num_layers: NumLayers = lambda model: None  # asked for a model's layers
    # Our keys that win over what the file says
    given: Mapping[str, str] = field(default_factory=dict)
    taken: dict[str, Taken] = field(default_factory=dict)  # our values by dotted keys
    left_out: list[LeftOut] = field(default_factory=list)  # keys that are not taken over
    notes: list[str] = field(default_factory=list)  # sentences about what is otherwise here

    def take(self, key: str, default: Any = None) -> Any:
        """A value of theirs, which is done with; an empty one is the default."""
        value = self.theirs.pop(key, None)
        return default if value is None else value

    def set(self, key: str, value: Any, origin: str) -> None:
        """Sets a key of ours."""
        self.taken[key] = Taken(value, origin)

    def move(self, key: str, ours: str) -> None:
        """Takes a value over as it is, if it is there."""
        if (value := self.take(key)) is not None:
            self.set(ours, value, key)

    def move_path(self, key: str, ours: str) -> None:
        """Takes a path over, as it is found from here."""
        if (path := self.take(key)) is not None:
            self.set(ours, self.place(str(path)), key)

    def leave_out(self, key: str, value: Any, reason: str) -> None:
        """Leaves a key out."""
        self.left_out.append(LeftOut(f"{key}: {brief(value)}", reason))

    def drop(self, key: str, reason: str = "") -> None:
        """Leaves a key out, if it is there, for a reason or for the usual one."""
        if (value := self.take(key)) is not None:
            self.leave_out(key, value, reason or reason_for(key) or "no counterpart here")

    def value_of(self, ours: str, default: Any = None) -> Any:
        """What a key of ours has been set to."""
        return self.taken[ours].value if ours in self.taken else default

    def refuse(self, key: str, value: Any, reason: str) -> ConfigError:
        """The error for a file that trains something else."""
        return ConfigError(f"{self.file.name} cannot be converted: {key}: {brief(value)} {reason}")

    def place(self, path: str) -> str:
        """A path of theirs as it is found from here: they go from where they are started."""
        beside = self.file.parent / path
        return beside.as_posix() if not exists(Path(path)) and exists(beside) else path


Defaults = Mapping[str, Mapping[str, Any]]
"""Values by our sections and keys."""


@dataclass(frozen=True)
class Dialect:
    """Another trainer's way to write a run down."""

    name: str  # the trainer's
    marks: str  # keys by which its files are known
    keys: str  # those whose values are taken over as they are, for what config/names.py says
    convert: Callable[[Draft], None]  # makes of a draft what is more than another name
    defaults: Defaults  # what the trainer does where its file says nothing


def listed(value: Any) -> list[Any]:
    """A list, or the one value that stands for a list of it."""
    return value if isinstance(value, list) else [value]


def brief(value: Any) -> str:
    """A value of theirs in few characters."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(map(str, list(value)[:4])) + "}"
    text = " ".join(str(value).split())
    return text if len(text) <= 40 else text[:37] + "..."
