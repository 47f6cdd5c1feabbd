"""Strict YAML and JSON: reading, with the line of every error, and writing.

Unlike in PyYAML's ``safe_load``, ``1e-4`` is a number, ``010`` and ``1:30`` are not, and duplicate
keys, tags, several documents, and anchors and aliases are errors; other trainers' files may have
aliases.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from qlora_wgpu.config.paths import DATA_SUFFIXES
from qlora_wgpu.errors import CheckpointError, ConfigError, QLoRAError, shell_word
from qlora_wgpu.files import LFS_PREFIX, UTF_16, exists, file_bytes, is_dir, is_file, open_file
from qlora_wgpu.limits import MODEL_JSON_BYTES, YAML_BYTES, YAML_DEPTH, YAML_KEY, YAML_NODES
from qlora_wgpu.visible import one_line, visible_json

# ---- syntax errors ------------------------------------------------------------------------------

_BRACKETS = {"mapping": "{", "sequence": "["}
# Errors whose mark is where the end is missing; their context is where the collection starts.
_UNCLOSED = ("expected ',' or", "unexpected end of stream", "expected ':'")


def _location(err: yaml.MarkedYAMLError) -> str:
    """`` (line 3, column 1)``, or nothing if it is unknown."""
    problem = str(err.problem)
    mark = err.problem_mark or err.context_mark
    if err.context_mark and any(text in problem for text in _UNCLOSED):
        mark = err.context_mark
    return f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""


def _explanation(err: yaml.MarkedYAMLError) -> str:
    problem, context = str(err.problem or "it cannot be read"), str(err.context or "")
    if "'\\t'" in problem:
        return "a tab is used for indentation: use spaces"
    if "escape" in problem:  # "C:\Users": eight digits are missing
        return "in double quotes, a backslash starts an escape: use single quotes, or / in paths"
    if "mapping values are not allowed" in problem:
        return "unexpected ': ' in a value (check the indentation, or use quotes)"
    if "expected <block end>" in problem:
        return _misplaced(problem.rpartition("found ")[2])
    if "expected ',' or" in problem:
        bracket = _BRACKETS.get(context.rpartition(" ")[2], "bracket")
        return f"the {bracket} is not closed, or a comma is missing between two values"
    if "unexpected end of stream" in problem:
        return "the quote is not closed"
    if "could not find expected ':'" in problem:
        return "a key is not followed by ': '"
    if "cannot start any token" in problem:
        return f"a value that begins with {problem.split()[2]} needs quotes"
    if "alias" in context or "anchor" in context:
        return "a value that begins with * or & needs quotes"
    return f"{context}, {problem}" if context else problem


def _misplaced(token: str) -> str:
    if token == "'<block mapping start>'":
        return "its indentation does not match any line above: align the keys of a section"
    if token == "'-'":
        return "unexpected list entry among keys: put a key above the list"
    if token == "'<scalar>'":
        return "unexpected text after a closing quote: use the other kind of quotes"
    return f"expected a key, got {token}"


# ---- files that are no configuration -------------------------------------------------------------

_YAML = (".yaml", ".yml")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_MAX_ENTRIES = 1000  # of a folder that are read


def _refuse_other_files(path: Path) -> None:
    """Raises ConfigError for data, models and folders, with the command that uses them."""
    suffix = path.suffix.lower()
    if is_dir(path):
        raise ConfigError(f"{path} is {_folder(path)}")
    if exists(path) and suffix in _WEIGHTS:
        model = path if suffix == ".gguf" else path.parent
        raise ConfigError(f"{path} is {_init_for('a weight file', model=model)}")
    if exists(path) and suffix in DATA_SUFFIXES and (suffix != ".json" or _is_json_list(path)):
        raise ConfigError(f"{path} is {_init_for('a data file', data=path)}")


def _folder(path: Path) -> str:
    names = _names_in(path)
    if files := [name for name in names if name.endswith(_YAML)]:
        file = "config.yaml" if "config.yaml" in files else min(files)
        kind = "a run's folder" if "metrics.jsonl" in names else "a folder"
        return f"{kind}: use the YAML file in it, such as {path / file}"
    if "adapter_config.json" in names:
        return (
            "an adapter's folder, not a configuration: use the YAML file of a run, with the "
            "adapter in lora.init_from (train) or --adapter (eval)"
        )
    if "config.json" in names:
        return _init_for("a model's folder", model=path)
    if any(name.lower().endswith(DATA_SUFFIXES) for name in names):
        return _init_for("a folder of data", data=path)
    return "a folder without a YAML file: create one with `qlora-wgpu init`"


def _init_for(kind: str, model: Path | None = None, data: Path | None = None) -> str:
    options = (
        f"--model {shell_word(str(model)) if model else 'MODEL'} "
        f"--data {shell_word(str(data)) if data else 'DATA'}"
    )
    return f"{kind}, not a configuration: create one with `qlora-wgpu init {options}`"


def _names_in(path: Path) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return [entry.name for entry, _ in zip(entries, range(_MAX_ENTRIES), strict=False)]
    except OSError:
        return []


def _is_json_list(path: Path) -> bool:
    """Whether a file contains a list, as data does; other trainers' settings are an object."""
    if not is_file(path):
        return False
    with open_file(path) as file:
        return file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def _similar_name(path: Path) -> str:
    """The end of the sentence about a missing file: a suggestion, if there is one."""
    if is_file(path.with_suffix("") / "config.yaml"):
        return f": did you mean {path.with_suffix('') / 'config.yaml'}?"
    names = [
        name
        for name in _names_in(path.parent)
        if name.endswith((*_YAML, ".json")) or is_file(path.with_name(name) / "config.yaml")
    ]
    near = difflib.get_close_matches(path.name, names, n=1)
    return f": did you mean {path.with_name(near[0])}?" if near else ""


# ---- JSON ----------------------------------------------------------------------------------------


_JSON_KINDS = {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}


def read_json_object(
    path: Path, most: int = MODEL_JSON_BYTES, error: type[QLoRAError] = CheckpointError
) -> dict[str, Any]:
    """Reads a JSON object of at most ``most`` bytes."""
    try:
        raw = file_bytes(path, most)
    except OSError as err:
        raise error(f"{path} cannot be read: {err.strerror or err}") from err
    if raw.startswith(LFS_PREFIX):
        raise error(f"{path} is a Git LFS pointer, not the file: run git lfs pull")
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as err:
        raise error(f"{path} is not valid UTF-8 at byte {err.start}") from err
    except json.JSONDecodeError as err:
        where = f"line {err.lineno}, column {err.colno}"
        raise error(f"{path} is not valid JSON ({where}: {err.msg})") from err
    except (RecursionError, ValueError) as err:
        raise error(f"{path} is not valid JSON: {err}") from err
    if not isinstance(value, dict):
        kind = _JSON_KINDS.get(type(value), "a number")
        raise error(f"{path} must hold a JSON object, not {kind}")
    return value


# ---- reading and writing -------------------------------------------------------------------------

_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_FLOAT = re.compile(
    r"[-+]?([0-9][0-9_]*\.[0-9_]*([eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|\.[0-9][0-9_]*([eE][-+]?[0-9]+)?|\.(inf|Inf|INF))|\.(nan|NaN|NAN)"
)
_BOOL = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_NULL = {"", "~", "null", "Null", "NULL"}


@dataclass
class YamlFile:
    """Values of a file and their lines."""

    values: dict[str, Any] = field(default_factory=dict)  # the top-level mapping
    # 1-based line of every key by its path: ``lines[("lora", "r")]``
    lines: dict[tuple[str, ...], int] = field(default_factory=dict)


class AliasError(ConfigError):
    """An anchor or alias, which only other trainers' files may have."""


def read_yaml_file(path: Path, *, aliases: bool = False) -> YamlFile:
    """Reads a configuration file."""
    try:
        _refuse_other_files(path)
        raw = file_bytes(path, YAML_BYTES)
    except FileNotFoundError:
        raise ConfigError(
            f"the configuration file {path} does not exist{_similar_name(path)}"
        ) from None
    except (OSError, ValueError) as err:
        reason = getattr(err, "strerror", None) or str(err)
        raise ConfigError(f"cannot read the configuration file {path}: {reason}") from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as err:
        if raw.startswith(UTF_16):
            raise ConfigError(f"{path} is UTF-16 text: save it as UTF-8") from None
        line = raw[: err.start].count(b"\n") + 1
        raise ConfigError(f"{path} (line {line}) is not UTF-8 text: save it as UTF-8") from None
    return parse_yaml_mapping(text, path.name, aliases=aliases)


def parse_yaml_mapping(text: str, name: str, *, aliases: bool = False) -> YamlFile:
    """Parses a document whose top level is a mapping; ``name`` is for error messages."""
    loader, node = _composed(text, name, aliases=aliases)
    if node is None:
        raise ConfigError(f"{name} is empty: at least model.path is required")
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{name} must contain sections such as 'model:' and 'lora:'")
    return YamlFile(loader.value(node), loader.lines)


def parse_yaml_value(text: str, name: str) -> Any:
    """Parses the value of an override, after its ``=``."""
    if len(text) > YAML_BYTES:
        raise ConfigError(f"{name[:80]}... is longer than {YAML_BYTES:,} characters")
    loader, node = _composed(text, name)
    return None if node is None else loader.value(node)


_Path = tuple[str, ...]
_Pair = tuple[yaml.Node, yaml.Node]


class _Loader(yaml.SafeLoader):
    """Reads one document; anything beyond plain values is an error with its line.

    With ``aliases``, an alias is replaced by its node, and a merge key by the keys it merges.
    Nested aliases grow exponentially, so that nodes are counted as they are read.
    """

    def __init__(self, text: str, name: str, *, aliases: bool) -> None:
        super().__init__(text)
        self.lines: dict[_Path, int] = {}
        self._name, self._aliases = name, aliases
        self._composed = self._depth = self._nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        is_collection = isinstance(event, yaml.CollectionStartEvent)
        self._composed += 1
        self._depth += is_collection
        if self._depth > YAML_DEPTH:  # deeper takes quadratic time, then overflows the stack
            raise ConfigError(f"{self._at(event)} is nested too deeply")
        if self._composed > YAML_NODES:  # each takes a tenth of a millisecond
            raise ConfigError(
                f"{self._at(event)} has more than {YAML_NODES:,} keys and values, too many for a "
                "configuration"
            )
        is_alias = isinstance(event, yaml.AliasEvent) or event.anchor is not None
        if is_alias and not self._aliases:
            raise AliasError(
                f"{self._at(event)} uses an anchor or alias (& or *), which is not supported: "
                "repeat the value, in quotes if it starts with & or *"
            )
        if (tag := getattr(event, "tag", None)) is not None:
            raise ConfigError(
                f"{self._at(event)} uses the tag {tag!r}, which is not supported: "
                "write the plain value, in quotes if it starts with !"
            )
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= is_collection
        return node

    def _at(self, place: Any) -> str:
        return f"{self._name} (line {place.start_mark.line + 1})"

    def value(self, node: yaml.Node, path: _Path = ()) -> Any:
        self._count(len(path))
        if isinstance(node, yaml.ScalarNode):
            if node.style is not None:  # quoted or a block of text
                return node.value
            return plain_scalar(node.value, self._at(node))
        if isinstance(node, yaml.SequenceNode):
            return [self.value(child, (*path, "[]")) for child in node.value]
        values: dict[str, Any] = {}
        for key_node, value_node in self._pairs(node, len(path)):
            key, where = key_node.value, self._at(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{where} has a key that is not plain text")
            if len(key) > YAML_KEY or not key.isprintable():
                raise ConfigError(
                    f"{where} has a key that is longer than {YAML_KEY} characters or "
                    "contains a control character"
                )
            key_path = (*path, key)
            if key in values:
                raise ConfigError(
                    f"{where} sets '{'.'.join(key_path)}' again: "
                    f"it is already set in line {self.lines[key_path]}"
                )
            self.lines[key_path] = key_node.start_mark.line + 1
            values[key] = self.value(value_node, key_path)
        return values

    def _count(self, depth: int) -> None:
        self._nodes += 1
        if self._aliases and (self._nodes > YAML_NODES or depth > YAML_DEPTH):
            raise ConfigError(
                f"{self._name} is too large or too deep with its aliases (*) expanded; one may "
                "contain itself"
            )

    def _pairs(self, node: yaml.Node, depth: int) -> Iterator[_Pair]:
        """A mapping's own keys, then those merged into it that are new."""
        merges = [value for key, value in node.value if self._aliases and _is_merge(key)]
        own = [pair for pair in node.value if not (self._aliases and _is_merge(pair[0]))]
        yield from own
        seen = {key.value for key, _ in own if isinstance(key, yaml.ScalarNode)}
        for value in merges:
            for merged in self._merged(value, depth + 1):
                yield from (pair for pair in merged if pair[0].value not in seen)
                seen |= {pair[0].value for pair in merged}

    def _merged(self, value: yaml.Node, depth: int) -> Iterator[list[_Pair]]:
        """The keys of each mapping that a merge key names."""
        for source in value.value if isinstance(value, yaml.SequenceNode) else [value]:
            self._count(depth)
            if not isinstance(source, yaml.MappingNode):
                raise ConfigError(f"{self._at(value)} merges (<<) a value that is not a mapping")
            pairs = list(self._pairs(source, depth))
            yield [pair for pair in pairs if isinstance(pair[0], yaml.ScalarNode)]


def _is_merge(key: yaml.Node) -> bool:
    return isinstance(key, yaml.ScalarNode) and key.value == "<<" and key.style is None


def _composed(text: str, name: str, *, aliases: bool = False) -> tuple[_Loader, yaml.Node | None]:
    try:
        loader = _Loader(text, name, aliases=aliases)
        return loader, loader.get_single_node()
    except yaml.MarkedYAMLError as err:
        if (mark := err.problem_mark) and err.problem == "but found another document":
            where = f"{name} (line {mark.line + 1})"
            raise ConfigError(f"{where} starts a second document: keep one") from None
        raise ConfigError(
            f"{name}{_location(err)} is not valid YAML: {_explanation(err)}"
        ) from None
    except yaml.reader.ReaderError as err:
        line = text[: err.position].count("\n") + 1
        code = err.character if isinstance(err.character, int) else ord(err.character)
        raise ConfigError(
            f"{name} (line {line}) contains the control character U+{code:04X}: remove it"
        ) from None


def plain_scalar(text: str, where: str = "the value") -> Any:
    """The value of an unquoted scalar: null, a boolean, a number, or else text."""
    if text in _NULL:
        return None
    if text in (text.lower(), text.capitalize(), text.upper()) and text.lower() in _BOOL:
        return _BOOL[text.lower()]
    if _INT.fullmatch(text):
        try:
            return int(text.replace("_", ""))
        except ValueError:
            raise ConfigError(f"{where} contains a number with too many digits") from None
    if _FLOAT.fullmatch(text):
        bare = text.replace("_", "").lower()
        return float(bare.replace(".inf", "inf").replace(".nan", "nan"))
    return text


class _Dumper(yaml.SafeDumper):
    """Writes lists on one line and quotes text that would be read as another type."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    try:
        is_text = plain_scalar(text) == text
    except ConfigError:
        is_text = False
    # A quoted line keeps line breaks of every kind; a block would not keep "\r" or "\x85".
    style = '"' if not is_text or any(c < " " or c in "\x85\u2028\u2029" for c in text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _represent_list(dumper: yaml.SafeDumper, items: list[Any]) -> yaml.SequenceNode:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(list, _represent_list)


def dump_yaml(values: Mapping[str, Any]) -> str:
    """Nested mappings as block-style YAML, which this module reads back unchanged."""
    return yaml.dump(
        dict(values),
        Dumper=_Dumper,
        sort_keys=False,
        default_flow_style=False,
        allow_unicode=True,
        width=2**31,
    )


# ---- writing with comments -----------------------------------------------------------------------

_COMMENT_COLUMN = 38
_PLAIN = frozenset("/._-")

Value = str | bool | int | float | dict[str, str] | list[dict[str, str]]


@dataclass(frozen=True)
class Setting:
    """One line of a configuration."""

    key: str  # section and key, such as ``"optim.learning_rate"``
    value: Value
    why: str = ""  # the comment: what it is for, or why it has this value
    is_active: bool = True  # otherwise the line is commented out, for the user to fill in

    @property
    def section(self) -> str:
        """The key's section."""
        return self.key.partition(".")[0]

    def line(self) -> str:
        """The line in its section."""
        mark = "" if self.is_active else "# "
        text = f"  {mark}{self.key.partition('.')[2]}: {_yaml_value(self.value)}"
        comment = f"# {one_line(self.why)}" if self.why else ""
        return f"{text:{_COMMENT_COLUMN - 2}}  {comment}".rstrip()


def commented_yaml(title: str, settings: Sequence[Setting]) -> str:
    """A file with a title and a comment for each setting."""
    parts = [f"# {one_line(title)}"]
    for section, lines in groupby(settings, key=lambda setting: setting.section):
        parts.append("\n".join([f"{section}:", *(line.line() for line in lines)]))
    return parts[0] + "\n" + "\n\n".join(parts[1:]) + "\n"


def _yaml_value(value: Value) -> str:
    """A value on one line, with text quoted where necessary."""
    if isinstance(value, list):
        entries = (", ".join(f"{k}: {_yaml_value(v)}" for k, v in each.items()) for each in value)
        return f"[{', '.join(f'{{{entry}}}' for entry in entries)}]"
    if isinstance(value, dict):  # its text may look like another type
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
