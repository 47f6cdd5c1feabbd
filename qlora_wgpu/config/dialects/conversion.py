"""Converts another trainer's file to a run.yaml, with a comment on every key."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qlora_wgpu.config.dialects import axolotl, llama_factory, mlx_lm, torchtune, trl, unsloth
from qlora_wgpu.config.dialects.draft import Dialect, Draft, DroppedKey, MappedValue, NumLayers
from qlora_wgpu.config.names import key_for
from qlora_wgpu.config.schema import Config, sections
from qlora_wgpu.config.yaml import dump_yaml, read_json_object, read_yaml_file
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.files import exists
from qlora_wgpu.limits import YAML_BYTES

DIALECTS = (
    axolotl.DIALECT,
    trl.DIALECT,
    llama_factory.DIALECT,
    mlx_lm.DIALECT,
    llama_factory.DIALECT_V1,
    unsloth.DIALECT,
    torchtune.DIALECT,
)
_REVISIONS = ("model_revision", "revision_of_model", "base_model_revision", "revision")
_ON_HUB = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_UNLIMITED = {  # our value for a number below 1, and what it means
    "train.max_steps": (-1, "trains for epochs"),
    "output.save_total_limit": (None, "keeps all"),
}
_PLACEHOLDER = re.compile(r"\$\{\w+[^}]*\}|\$[A-Z_]+\b")
_COMMENT_COLUMN = 42


@dataclass(frozen=True)
class Conversion:
    """A run's settings, converted from another trainer's file."""

    dialect: str  # the trainer's name
    file: str  # the file's name
    settings: Mapping[str, MappedValue]  # by our dotted keys
    dropped: list[DroppedKey]
    notes: list[str]  # sentences about differences

    def text(self) -> str:
        """The run's YAML, with the origin of each key, and the dropped keys at the end."""
        lines = [f"# From {self.file}, a configuration of {self.dialect}."]
        for note in self.notes:  # a key or path at the beginning is not capitalized
            begins = note[:1].upper() if note.partition(" ")[0].isalpha() else note[:1]
            lines.append(f"# {_one_line(begins + note[1:])}.")
        for section in Config.model_fields:
            keys = [f"{section}.{leaf}" for leaf in sections()[section]]
            if kept := [_line(key, self.settings[key]) for key in keys if key in self.settings]:
                lines += ["", f"{section}:", *kept]
        if self.dropped:
            lines += ["", f"# Not converted from {self.file}:"]
            lines += [f"#   {_one_line(each.key)} ({each.reason})" for each in self.dropped]
        return "\n".join(lines) + "\n"


def dialect_of(values: Mapping[str, Any]) -> Dialect | None:
    """The trainer whose files have these keys, or None."""
    ours = [name for name in Config.model_fields if isinstance(values.get(name), Mapping)]
    inner = {
        f"{name}.{key}"
        for name, section in values.items()
        if isinstance(section, Mapping)
        for key in section
    }
    counts = [(len(set(d.marks.split()) & (values.keys() | inner)), d) for d in DIALECTS]
    highest = max(count for count, _ in counts)
    likely = [dialect for count, dialect in counts if count == highest]
    return likely[0] if highest >= 2 and highest > len(ours) and len(likely) == 1 else None


def convert_file(
    path: Path, overrides: Mapping[str, str], num_layers: NumLayers = lambda model: None
) -> Conversion:
    """Converts a YAML or JSON file; overrides by our keys win over its values."""
    if path.suffix.lower() == ".json":
        values = read_json_object(path, YAML_BYTES, ConfigError)
    else:
        values = read_yaml_file(path, aliases=True).values
    dialect = dialect_of(values)
    if dialect is None and "model" in values and values.keys() <= sections().keys():
        raise ConfigError(
            f"{path} is already a configuration of qlora-wgpu: it needs no conversion"
        )
    if dialect is None:
        names = ", ".join(d.name for d in DIALECTS)
        raise ConfigError(f"{path} is not recognized as a configuration of {names} by its keys")
    draft = Draft(
        dict(values), path, lambda model: num_layers(overrides.get("model.path", model)), overrides
    )
    _convert(draft, dialect)
    conversion = Conversion(dialect.name, path.name, draft.settings, draft.dropped, draft.notes)
    _check(conversion)
    return conversion


def _convert(draft: Draft, dialect: Dialect) -> None:
    empty = [key for key, value in draft.remaining.items() if value is None]
    try:
        dialect.convert(draft)
    except (TypeError, AttributeError, ValueError, KeyError, IndexError, ZeroDivisionError) as err:
        raise ConfigError(
            f"{draft.file} cannot be converted: a value is invalid for {dialect.name} ({err})"
        ) from err
    revisions = {key: draft.take(key) for key in _REVISIONS}
    for key in [key for key in draft.remaining if key in dialect.keys.split()]:
        same_name = ((section, key) for section, keys in sections().items() if key in keys)
        ours, value = ".".join(key_for(key) or next(same_name)), draft.remaining[key]
        if ours in _UNLIMITED and isinstance(value, int) and value <= 0:
            unlimited, meaning = _UNLIMITED[ours]
            draft.set(ours, unlimited, f"{key}: {draft.take(key)} {meaning}")
        draft.convert({key: ours})
    for key in list(draft.remaining):
        draft.drop_key(key)
    for section, defaults in dialect.defaults.items():
        for key, value in defaults.items():
            if f"{section}.{key}" not in draft.settings:
                draft.set(f"{section}.{key}", value, f"{dialect.name}'s default")
    if model := draft.settings.get("model.path"):
        draft.set("model.path", draft.resolve(model.value), model.origin)
    _set_revision(draft, revisions)
    if "data.train" in draft.overrides:
        draft.settings.pop("data.sources", None)
    for ours, value in draft.overrides.items():
        draft.set(ours, value, "given on the command line")
    for ours, mapped in draft.settings.items():
        placeholder = _PLACEHOLDER.search(str(mapped.value))
        if placeholder and ours != "data.chat_template":
            draft.note(f"{placeholder[0]} in {ours} is not expanded: replace it")
    if "data.eval" in draft.settings:
        draft.settings.pop("data.eval_split", None)
    if empty:
        draft.dropped.append(DroppedKey(", ".join(empty), "empty"))


def _set_revision(draft: Draft, revisions: Mapping[str, Any]) -> None:
    """Appends a revision to the name of a Hub model; a folder has none."""
    for key, revision in revisions.items():
        if revision in (None, "main"):
            continue
        model = draft.settings.get("model.path")
        if model is None or "model.path" in draft.overrides:
            draft.drop(key, revision, "use --model OWNER/NAME@REVISION")
        elif exists(Path(model.value)) or not _ON_HUB.fullmatch(model.value):
            draft.drop(key, revision, f"{model.value} is a local folder")
        else:
            draft.set("model.path", f"{model.value}@{revision}", f"{model.origin}, {key}")


def _check(conversion: Conversion) -> None:
    """Raises ConfigError, which names the file, if the settings are incomplete or invalid."""
    if "model.path" not in conversion.settings:
        raise ConfigError(f"{conversion.file} names no model: set it with --model")
    if not {"data.train", "data.sources"} & conversion.settings.keys():
        raise ConfigError(f"{conversion.file} names no data: set it with --data")
    values: dict[str, dict[str, Any]] = {}
    for dotted, mapped in conversion.settings.items():
        section, _, key = dotted.partition(".")
        values.setdefault(section, {})[key] = mapped.value
    try:
        Config.model_validate(values)
    except ConfigError as err:
        raise ConfigError(f"{conversion.file} cannot be converted: {err}") from err


def _line(dotted: str, mapped: MappedValue) -> str:
    key = dotted.partition(".")[2]
    if isinstance(mapped.value, dict):
        inner = ", ".join(dump_yaml({k: v}).strip() for k, v in mapped.value.items())
        entry = f"  {key}: {{{inner}}}"
    else:
        entry = "  " + dump_yaml({key: mapped.value}).strip()
    if "\n" in entry:  # a template in several lines
        return entry.replace("\n", "\n  ")
    if mapped.origin == key:
        return entry
    return f"{entry:<{_COMMENT_COLUMN}}  # {_one_line(mapped.origin)}"


def _one_line(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
