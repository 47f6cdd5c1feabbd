"""From another trainer's file to a run of ours, with a comment for all that differs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qlora_wgpu.config.dialects import axolotl, llama_factory, mlx_lm, torchtune, trl, unsloth
from qlora_wgpu.config.dialects.draft import Dialect, Draft, MappedValue, NumLayers, Unmapped
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
_COUNTS = {  # by our keys: what stands for a number that is none, in each trainer
    "train.max_steps": (-1, "counts epochs"),
    "output.save_total_limit": (None, "keeps all"),
}
_PLACEHOLDER = re.compile(r"\$\{\w+[^}]*\}|\$[A-Z_]+\b")
_WIDTH = 42  # of what stands before a comment


@dataclass(frozen=True)
class Conversion:
    """A run, made of another trainer's file."""

    dialect: str  # the trainer's name
    file: str  # the file's name
    taken: Mapping[str, MappedValue]  # our values by dotted keys
    left_out: list[Unmapped]  # keys that are not taken over
    notes: list[str]  # sentences about what is otherwise here

    def text(self) -> str:
        """The run's YAML: each key says where it comes from, and the end what has no place here."""
        lines = [f"# From {self.file}, a file of {self.dialect}."]
        for note in self.notes:  # a key or a path at the beginning stays as it is
            begins = note[:1].upper() if note.partition(" ")[0].isalpha() else note[:1]
            lines.append(f"# {_one_line(begins + note[1:])}.")
        for section in Config.model_fields:
            keys = [f"{section}.{leaf}" for leaf in sections()[section]]
            if kept := [_line(key, self.taken[key]) for key in keys if key in self.taken]:
                lines += ["", f"{section}:", *kept]
        if self.left_out:
            lines += ["", f"# Not taken over from {self.file}:"]
            lines += [f"#   {_one_line(left.key)} ({left.reason})" for left in self.left_out]
        return "\n".join(lines) + "\n"


def dialect_of(values: Mapping[str, Any]) -> Dialect | None:
    """The trainer whose file holds such keys, or None where none is likely."""
    ours = [name for name in Config.model_fields if isinstance(values.get(name), Mapping)]
    inner = {
        f"{name}.{key}"
        for name, section in values.items()
        if isinstance(section, Mapping)
        for key in section
    }
    counts = [(len(set(d.marks.split()) & (values.keys() | inner)), d) for d in DIALECTS]
    most = max(count for count, _ in counts)
    likely = [dialect for count, dialect in counts if count == most]
    return likely[0] if most >= 2 and most > len(ours) and len(likely) == 1 else None


def convert_file(
    path: Path, given: Mapping[str, str], num_layers: NumLayers = lambda model: None
) -> Conversion:
    """Converts a file, YAML or JSON; given values of our keys win over what it says."""
    is_json = path.suffix.lower() == ".json"
    values = (
        read_json_object(path, YAML_BYTES, ConfigError)
        if is_json
        else read_yaml_file(path, aliases=True).values
    )
    dialect = dialect_of(values)
    if dialect is None:
        names = ", ".join(d.name for d in DIALECTS)
        raise ConfigError(f"{path} is known as a file of none of {names} by its keys")
    draft = _drafted(dialect, values, path, given, num_layers)
    conversion = Conversion(dialect.name, path.name, draft.taken, draft.left_out, draft.notes)
    _check(conversion)
    return conversion


def _drafted(
    dialect: Dialect,
    values: Mapping[str, Any],
    path: Path,
    given: Mapping[str, str],
    num_layers: NumLayers,
) -> Draft:
    draft = Draft(
        dict(values), path, lambda model: num_layers(given.get("model.path", model)), given
    )
    empty = [key for key, value in values.items() if value is None]
    try:
        dialect.convert(draft)
    except (TypeError, AttributeError, ValueError, KeyError, IndexError, ZeroDivisionError) as err:
        raise ConfigError(
            f"{path} cannot be converted: a value is not as {dialect.name} takes it ({err})"
        ) from err
    revisions = {key: draft.take(key) for key in _REVISIONS}
    for key in [key for key in draft.theirs if key in dialect.keys.split()]:
        homes = ((section, key) for section, keys in sections().items() if key in keys)
        ours, value = ".".join(key_for(key) or next(homes)), draft.theirs[key]
        if ours in _COUNTS and isinstance(value, int) and value <= 0:
            stands, why = _COUNTS[ours]
            draft.set(ours, stands, f"{key}: {draft.take(key)} {why}")
        draft.convert({key: ours})
    for key in list(draft.theirs):
        draft.drop(key)
    for section, usual in dialect.defaults.items():
        for key, value in usual.items():
            if f"{section}.{key}" not in draft.taken:
                draft.set(f"{section}.{key}", value, f"{dialect.name}'s default")
    if "model.path" in draft.taken:
        model = draft.taken["model.path"]
        draft.set("model.path", draft.place(model.value), model.origin)
    _set_revision(draft, revisions)
    if "data.train" in given:
        draft.taken.pop("data.sources", None)
    for ours, value in given.items():
        draft.set(ours, value, "given on the command line")
    for ours, taken in draft.taken.items():
        placeholder = _PLACEHOLDER.search(str(taken.value))
        if placeholder and ours != "data.chat_template":
            draft.notes.append(f"{placeholder[0]} in {ours} is not filled in: write the value out")
    if "data.eval" in draft.taken:
        draft.taken.pop("data.eval_split", None)
    if empty:
        draft.left_out.append(Unmapped(", ".join(empty), "empty there"))
    return draft


def _set_revision(draft: Draft, revisions: Mapping[str, Any]) -> None:
    """Writes the revision of a model of the hub behind its name; a folder has none."""
    for key, revision in revisions.items():
        if revision in (None, "main"):
            continue
        model = draft.taken.get("model.path")
        if model is None or "model.path" in draft.given:
            draft.leave_out(key, revision, "--model names the model, as OWNER/NAME@REVISION does")
        elif exists(Path(model.value)) or not _ON_HUB.fullmatch(model.value):
            draft.leave_out(key, revision, f"{model.value} is a folder, and is read as it is")
        else:
            draft.set("model.path", f"{model.value}@{revision}", f"{model.origin}, {key}")


def _check(conversion: Conversion) -> None:
    """Makes sure that the result is a configuration, and speaks of their keys where it is not."""
    for key, option in (("model.path", "--model"), ("data.train", "--data")):
        if key not in conversion.taken and not (
            key == "data.train" and "data.sources" in conversion.taken
        ):
            raise ConfigError(
                f"{conversion.file} names no {'model' if option == '--model' else 'data'}: name it "
                f"with {option}"
            )
    sections: dict[str, dict[str, Any]] = {}
    for dotted, taken in conversion.taken.items():
        section, _, key = dotted.partition(".")
        sections.setdefault(section, {})[key] = taken.value
    try:
        Config.model_validate(sections)
    except ConfigError as err:
        raise ConfigError(f"{conversion.file} cannot be converted: {err}") from err


def _line(dotted: str, taken: MappedValue) -> str:
    key = dotted.partition(".")[2]
    value = taken.value if not isinstance(taken.value, dict) else dict(taken.value)
    if isinstance(value, dict):
        inner = ", ".join(dump_yaml({k: v}).strip() for k, v in value.items())
        entry = f"  {key}: {{{inner}}}"
    else:
        entry = "  " + dump_yaml({key: value}).strip()
    if "\n" in entry:  # a template in several lines
        return entry.replace("\n", "\n  ")
    if taken.origin == key:
        return entry
    return f"{entry:<{_WIDTH}}  # {_one_line(taken.origin)}"


def _one_line(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
