"""A configuration in the making from another trainer's file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qlora_wgpu import files
from qlora_wgpu.config.names import reason_for
from qlora_wgpu.config.paths import BUILT_IN_CHAT_TEMPLATES, is_inline_template
from qlora_wgpu.errors import ConfigError

NumLayers = Callable[[str], int | None]
"""Number of a model's layers by its name, where it is known."""
Rows = Mapping[str, str | tuple[str, Callable[[Any], Any]]]
"""By their keys: our key; it and what their value is made into, None for nothing; or a reason."""

ONE_WINDOW = (
    "here data.truncation is of all rows; with windows texts are cut so, and other rows at the end"
)
PACKED_APART = "rows packed into one sequence see each other there; here they do not"


@dataclass(frozen=True)
class MappedValue:
    """A value of ours and where it comes from."""

    value: Any  # as the schema takes it
    origin: str  # their key, or why the value stands there


@dataclass(frozen=True)
class Unmapped:
    """A key of theirs that is not taken over."""

    key: str  # theirs, with the value
    reason: str  # why


@dataclass(frozen=True)
class RowsOf:
    """How the rows of one data set are read."""

    format: str | None = None  # their format; None for what their keys tell
    # Their columns by the format's keys, where these are called otherwise
    columns: Mapping[str, str] = field(default_factory=dict)
    origin: str = ""  # the key of theirs that says it

    @classmethod
    def named(cls, row_format: str | None, columns: Mapping[str, Any], origin: str) -> RowsOf:
        """Those of a format, of which some columns may have names of their own."""
        renamed = {key: str(name) for key, name in columns.items() if name and name != key}
        return cls(row_format, renamed, origin)


@dataclass(frozen=True)
class Source:
    """One of the data sets of a file."""

    path: str  # where it is
    rows: RowsOf = RowsOf()  # how its rows are read
    # ``weight`` or ``rows``, where it gives no more than a part
    portion: Mapping[str, float] = field(default_factory=dict)

    def entry(self) -> dict[str, Any]:
        """It as ``data.sources`` has it."""
        said = {"format": self.rows.format, "columns": dict(self.rows.columns)}
        return {"path": self.path, **{k: v for k, v in said.items() if v}, **self.portion}


@dataclass
class Draft:
    """What has been made of a file, and what is left of it."""

    theirs: dict[str, Any]  # their keys that have not been looked at yet
    file: Path  # the file
    num_layers: NumLayers = lambda model: None  # asked for a model's layers
    # Our keys that win over what the file says
    given: Mapping[str, str] = field(default_factory=dict)
    taken: dict[str, MappedValue] = field(default_factory=dict)  # our values by dotted keys
    left_out: list[Unmapped] = field(default_factory=list)  # keys that are not taken over
    notes: list[str] = field(default_factory=list)  # sentences about what is otherwise here

    # -- keys --------------------------------------------------------------------------------------

    def take(self, key: str, default: Any = None) -> Any:
        """A value of theirs, which is done with; an empty one is the default."""
        value = self.theirs.pop(key, None)
        return default if value is None else value

    def set(self, key: str, value: Any, origin: str) -> None:
        """Sets a key of ours."""
        self.taken[key] = MappedValue(value, origin)

    def convert(self, rows: Rows, given: Mapping[str, Any] | None = None, of: str = "") -> None:
        """Takes over or leaves out what is there of some keys, or of a part's (``of``) keys."""
        for key, row in rows.items():
            value = self.take(key) if given is None else given.get(key)
            ours, how = row if isinstance(row, tuple) else (row, lambda value: value)
            if value is None:
                continue
            if " " in ours:
                self.leave_out(of + key, value, ours)
            elif (made := how(value)) is not None:
                self.set(ours, made, of + key)

    def leave_out(self, key: str, value: Any, reason: str) -> None:
        """Leaves a key out."""
        self.left_out.append(Unmapped(f"{key}: {brief(value)}", reason))

    def drop(self, key: str, reason: str = "") -> None:
        """Leaves a key out, if it is there, for a reason or for the usual one."""
        self.convert({key: reason or reason_for(key) or "no counterpart here"})

    def value_of(self, ours: str, default: Any = None) -> Any:
        """What a key of ours has been set to."""
        return self.taken[ours].value if ours in self.taken else default

    def refuse(self, key: str, value: Any, reason: str) -> ConfigError:
        """The error for a file that trains something else."""
        return ConfigError(f"{self.file.name} cannot be converted: {key}: {brief(value)} {reason}")

    # -- places ------------------------------------------------------------------------------------

    def place(self, given: Any) -> str:
        """A path of theirs as it is found from here: they go from where they are started."""
        path = str(given)
        beside = self.file.parent / path
        is_beside = not files.exists(Path(path)) and files.exists(beside)
        return beside.as_posix() if is_beside else path

    def is_file(self, path: str) -> bool:
        """Whether a place of theirs is one file, which has no splits."""
        return files.is_file(Path(self.place(path)))

    def hub_place(self, path: str, subset: Any = None, split: Any = None) -> str:
        """A file, a folder or a data set of the hub; of several parts that are joined the first."""
        first, *more = self.hub_places(path, subset, split)
        if more:
            self.leave_out("split", split, f"one split of {path} is taken: {first}")
        return first

    def hub_places(self, path: str, subset: Any = None, split: Any = None) -> list[str]:
        """The parts of a file, a folder or a data set of the hub: its splits, or slices of them."""
        return [_part(self.place(path), subset, part) for part in str(split or "train").split("+")]

    def file_places(self, files: Sequence[Any], split: Any, key: str) -> list[str]:
        """Files that a data set is made of, whose one split is theirs together."""
        places = [self.place(file) for file in files]
        _, bracket, rest = str(split or "train").partition("[")
        if len(places) == 1:
            return [_part(places[0], None, "train" + bracket + rest)]
        if bracket:
            self.leave_out(f"{key}.split", split, "it is a slice of several files: take one of "
                           f"each, such as {places[0]}[:100]")  # fmt: skip
        return places

    # -- data --------------------------------------------------------------------------------------

    def set_rows(self, rows: RowsOf) -> None:
        """The rows' format, and their columns where these are called otherwise."""
        if rows.format is not None:
            self.set("data.format", rows.format, rows.origin)
        if rows.columns:
            self.set("data.columns", dict(rows.columns), rows.origin)

    def set_sources(self, sources: Sequence[Source], origin: str) -> None:
        """The training data: one data set, or a mixture of several."""
        if len(sources) == 1 and not sources[0].portion:
            self.set("data.train", sources[0].path, origin)
            self.set_rows(sources[0].rows)
        else:
            self.set("data.sources", [source.entry() for source in sources], origin)

    def set_held_out(self, places: Sequence[str], key: str) -> None:
        """The held-out data, which is the first of several."""
        self.set("data.eval", places[0], key)
        if others := places[1:]:
            self.leave_out(key, ", ".join(others), "data.eval names one data set")

    def first_rows(self, sources: Sequence[Source], most: Any, origin: str) -> list[Source]:
        """Sources of which each gives so many rows at most, its first ones."""
        limited = []
        for source in sources:
            if "rows" in source.portion and source.portion["rows"] >= 1:
                source = replace(source, portion={"rows": min(source.portion["rows"], most)})
            elif source.path.endswith("]"):
                self.leave_out(origin, most, f"{source.path} is a slice already")
            else:
                source = replace(source, path=f"{source.path}[:{most}]")
            limited.append(source)
        return limited

    def set_template(self, template: Any, origin: str, default: str = "") -> None:
        """The chat template, where it is one that is known here."""
        if template is None or template == default:
            return
        name = str(template)
        if name in BUILT_IN_CHAT_TEMPLATES or is_inline_template(name):
            self.set("data.chat_template", name, origin)
        elif name.endswith(".jinja"):
            self.set("data.chat_template", self.place(name), origin)
        else:
            self.leave_out(
                origin,
                template,
                "the tokenizer's own template is used; where it has none, set data.chat_template",
            )

    def set_tokens(self, key: str, tokens: list[str], origin: str) -> None:
        """Tokens that are added to the tokenizer, special or not."""
        if tokens:
            trained = "their rows of the embedding and of the head are trained here"
            self.set(f"model.{key}", tokens, f"{origin}; {trained}")


def _part(place: str, subset: Any, split: str) -> str:
    name, bracket, rest = split.strip().partition("[")
    rows = (bracket + rest).replace(" ", "")
    if subset:
        return f"{place}:{subset}/{name or 'train'}{rows}"
    return f"{place}{rows}" if name in ("", "train") else f"{place}:{name}{rows}"


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


def listed_tokens(value: Any) -> list[str]:
    """Tokens of a list, or of a text with commas between them."""
    given = value if isinstance(value, list) else str(value).split(",")
    return list(dict.fromkeys(token for each in given if (token := str(each).strip())))


def brief(value: Any) -> str:
    """A value of theirs in few characters."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(map(str, list(value)[:4])) + "}"
    text = " ".join(str(value).split())
    return text if len(text) <= 40 else text[:37] + "..."
