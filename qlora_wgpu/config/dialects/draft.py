"""The settings that are being converted from another trainer's file."""

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
"""Number of a model's layers by its name, if it is known."""
KeyTable = Mapping[str, str | tuple[str, Callable[[Any], Any]]]
"""By the trainer's keys: our key; our key and a function of the value, or a reason to drop it.

The function returns None for a value that is not set.
"""
Defaults = Mapping[str, Mapping[str, Any]]
"""Values by our sections and keys."""

NO_COUNTERPART = "not supported"
NO_FULL_FINE_TUNING = "full fine-tuning is not supported: a LoRA adapter is trained"
ONE_EVAL = "data.eval is a single data set"
ONE_TRUNCATION = (
    "here data.truncation is the same for all rows; windows splits text and truncates other rows"
)
PACKED_ATTENTION = "there, packed rows attend to each other; here they do not"


@dataclass(frozen=True)
class MappedValue:
    """A value of ours and where it comes from."""

    value: Any  # as the schema expects it
    origin: str  # the trainer's key, or why it has this value


@dataclass(frozen=True)
class DroppedKey:
    """A key of the trainer that is not converted."""

    key: str  # with its value
    reason: str


@dataclass(frozen=True)
class RowSpec:
    """How to read the rows of one data set."""

    format: str | None = None  # as for data.format; None detects it from the rows' keys
    columns: Mapping[str, str] = field(default_factory=dict)  # as for data.columns
    origin: str = ""  # the trainer's key

    @classmethod
    def named(cls, row_format: str | None, columns: Mapping[str, Any], origin: str) -> RowSpec:
        """Without the columns that have no name or the format's own."""
        renamed = {key: str(name) for key, name in columns.items() if name and name != key}
        return cls(row_format, renamed, origin)


@dataclass(frozen=True)
class Source:
    """One of the data sets of a file."""

    path: str
    rows: RowSpec = RowSpec()
    portion: Mapping[str, float] = field(default_factory=dict)  # ``weight`` or ``rows``, if any

    def entry(self) -> dict[str, Any]:
        """The entry in ``data.sources``."""
        spec = {"format": self.rows.format, "columns": dict(self.rows.columns)}
        return {"path": self.path, **{k: v for k, v in spec.items() if v}, **self.portion}


@dataclass
class Draft:
    """What has been converted of a file, and what remains of it."""

    remaining: dict[str, Any]  # the trainer's keys that are not yet converted
    file: Path
    num_layers: NumLayers = lambda model: None
    overrides: Mapping[str, str] = field(default_factory=dict)  # by our keys
    settings: dict[str, MappedValue] = field(default_factory=dict)  # by our keys
    dropped: list[DroppedKey] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # sentences about differences

    # -- keys --------------------------------------------------------------------------------------

    def take(self, key: str, default: Any = None) -> Any:
        """Removes a key of the trainer and returns its value, or the default if it is empty."""
        value = self.remaining.pop(key, None)
        return default if value is None else value

    def set(self, ours: str, value: Any, origin: str) -> None:
        """Sets a key of ours."""
        self.settings[ours] = MappedValue(value, origin)

    def get(self, ours: str, default: Any = None) -> Any:
        """The value that a key of ours was set to."""
        return self.settings[ours].value if ours in self.settings else default

    def convert(
        self, table: KeyTable, values: Mapping[str, Any] | None = None, prefix: str = ""
    ) -> None:
        """Converts or drops the keys of a table, from the file or from a mapping in it."""
        for key, target in table.items():
            value = self.take(key) if values is None else values.get(key)
            ours, function = target if isinstance(target, tuple) else (target, lambda value: value)
            if value is None:
                continue
            if " " in ours:
                self.drop(prefix + key, value, ours)
            elif (made := function(value)) is not None:
                self.set(ours, made, prefix + key)

    def drop(self, key: str, value: Any, reason: str) -> None:
        """Notes that a value is not converted."""
        self.dropped.append(DroppedKey(f"{key}: {brief(value)}", reason))

    def drop_key(self, key: str, reason: str = "") -> None:
        """Drops a key, if it is set, for a reason or for the usual one."""
        self.convert({key: reason or reason_for(key) or NO_COUNTERPART})

    def note(self, sentence: str) -> None:
        """Adds a sentence about a difference."""
        self.notes.append(sentence)

    def refuse(self, key: str, value: Any, reason: str) -> ConfigError:
        """The error for a file that cannot be converted."""
        return ConfigError(f"{self.file.name} cannot be converted: {key}: {brief(value)} {reason}")

    # -- paths -------------------------------------------------------------------------------------

    def resolve(self, given: Any) -> str:
        """A path relative to the current directory, or else to the file's folder."""
        path = str(given)
        in_folder = self.file.parent / path
        is_in_folder = not files.exists(Path(path)) and files.exists(in_folder)
        return in_folder.as_posix() if is_in_folder else path

    def is_file(self, path: str) -> bool:
        """Whether a data set is one file, which has no splits."""
        return files.is_file(Path(self.resolve(path)))

    def dataset_path(self, path: str, subset: Any = None, split: Any = None) -> str:
        """A file, folder or Hub data set; of several joined splits only the first."""
        first, *more = self.dataset_paths(path, subset, split)
        if more:
            self.drop("split", split, f"only the first split is used: {first}")
        return first

    def dataset_paths(self, path: str, subset: Any = None, split: Any = None) -> list[str]:
        """A file, folder or Hub data set, once for each split that is joined by ``+``."""
        splits = str(split or "train").split("+")
        return [_with_split(self.resolve(path), subset, part) for part in splits]

    def file_paths(self, names: Sequence[Any], split: Any, key: str) -> list[str]:
        """The files of a data set, which form a single split."""
        paths = [self.resolve(name) for name in names]
        _, bracket, rest = str(split or "train").partition("[")
        if len(paths) == 1:
            return [_with_split(paths[0], None, "train" + bracket + rest)]
        if bracket:
            reason = f"it is a slice of several files: use one per file, such as {paths[0]}[:100]"
            self.drop(f"{key}.split", split, reason)
        return paths

    # -- data --------------------------------------------------------------------------------------

    def set_rows(self, rows: RowSpec) -> None:
        """Sets the rows' format, and the columns that differ from it."""
        if rows.format is not None:
            self.set("data.format", rows.format, rows.origin)
        if rows.columns:
            self.set("data.columns", dict(rows.columns), rows.origin)

    def set_sources(self, sources: Sequence[Source], origin: str) -> None:
        """Sets the training data: one data set, or a mixture."""
        if len(sources) == 1 and not sources[0].portion:
            self.set("data.train", sources[0].path, origin)
            self.set_rows(sources[0].rows)
        else:
            self.set("data.sources", [source.entry() for source in sources], origin)

    def set_eval(self, paths: Sequence[str], key: str) -> None:
        """Sets the evaluation data to the first of several data sets."""
        self.set("data.eval", paths[0], key)
        if others := paths[1:]:
            self.drop(key, ", ".join(others), ONE_EVAL)

    def limit_rows(self, sources: Sequence[Source], count: Any, origin: str) -> list[Source]:
        """Sources limited to their first ``count`` rows."""
        limited = []
        for source in sources:
            if "rows" in source.portion and source.portion["rows"] >= 1:
                source = replace(source, portion={"rows": min(source.portion["rows"], count)})
            elif source.path.endswith("]"):
                self.drop(origin, count, f"{source.path} is already a slice")
            else:
                source = replace(source, path=f"{source.path}[:{count}]")
            limited.append(source)
        return limited

    def set_chat_template(self, template: Any, origin: str, default: str = "") -> None:
        """Sets the chat template, if it is inline, a file or built in."""
        if template is None or template == default:
            return
        name = str(template)
        if name in BUILT_IN_CHAT_TEMPLATES or is_inline_template(name):
            self.set("data.chat_template", name, origin)
        elif name.endswith(".jinja"):
            self.set("data.chat_template", self.resolve(name), origin)
        else:
            reason = "the tokenizer's template is used; if it has none, set data.chat_template"
            self.drop(origin, template, reason)

    def set_tokens(self, plain: tuple[str, list[str]], special: tuple[str, list[str]]) -> None:
        """Sets the plain and special tokens to add, each with its origin."""
        (origin, tokens), (special_origin, special_tokens) = plain, special
        tokens = [token for token in tokens if token not in special_tokens]
        trained = "their rows of the embedding and head are trained"
        if tokens:
            self.set("model.add_tokens", tokens, f"{origin}; {trained}")
        if special_tokens:
            self.set("model.add_special_tokens", special_tokens, f"{special_origin}; {trained}")


@dataclass(frozen=True)
class Dialect:
    """Another trainer's configuration format."""

    name: str  # the trainer's
    marks: str  # keys that identify its files
    keys: str  # keys that config/names.py maps to ours, with unchanged values
    convert: Callable[[Draft], None]  # converts all other keys
    defaults: Defaults  # the trainer's, where they differ from ours


def _with_split(path: str, subset: Any, split: str) -> str:
    name, bracket, rest = split.strip().partition("[")
    rows = (bracket + rest).replace(" ", "")
    if subset:
        return f"{path}:{subset}/{name or 'train'}{rows}"
    return f"{path}{rows}" if name in ("", "train") else f"{path}:{name}{rows}"


def listed(value: Any) -> list[Any]:
    """A list, or a list of a single value."""
    return value if isinstance(value, list) else [value]


def mapping_of(value: Any) -> Mapping[str, Any]:
    """A mapping, or an empty one instead of anything else."""
    return value if isinstance(value, Mapping) else {}


def words_of(value: Any) -> list[str]:
    """A list, or the words of text between commas or spaces."""
    return value if isinstance(value, list) else str(value).replace(",", " ").split()


def listed_tokens(value: Any) -> list[str]:
    """The distinct tokens of a list, or of text with commas between them."""
    given = value if isinstance(value, list) else str(value).split(",")
    return list(dict.fromkeys(token for each in given if (token := str(each).strip())))


def brief(value: Any) -> str:
    """A value in at most 40 characters."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(map(str, list(value)[:4])) + "}"
    text = " ".join(str(value).split())
    return text if len(text) <= 40 else text[:37] + "..."
