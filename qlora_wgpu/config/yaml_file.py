"""Strict YAML: what a configuration needs, and an error with a line number for all the rest.

Against PyYAML's ``safe_load``: ``1e-4`` is a number, ``010`` and ``1:30`` are not, duplicate
keys, anchors and aliases (which other trainers' files may have), tags and several documents are
errors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from qlora_wgpu.config.mistaken_paths import near_name, refuse_other_than_yaml
from qlora_wgpu.config.yaml_aliases import written_out
from qlora_wgpu.config.yaml_words import explain, place_of
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.files import UTF_16, file_bytes
from qlora_wgpu.limits import YAML_BYTES, YAML_DEPTH, YAML_KEY, YAML_NODES

_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_FLOAT = re.compile(
    r"[-+]?([0-9][0-9_]*\.[0-9_]*([eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|\.[0-9][0-9_]*([eE][-+]?[0-9]+)?|\.(inf|Inf|INF))|\.(nan|NaN|NAN)"
)
_BOOL = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_NULL = {"", "~", "null", "Null", "NULL"}


@dataclass
class YamlFile:
    """Values of a file and where they stand.

    Attributes:
        values: The top-level mapping.
        lines: Line number, from 1, of every key by its path: ``lines[("lora", "r")]``.
    """

    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[tuple[str, ...], int] = field(default_factory=dict)


class AliasError(ConfigError):
    """An anchor or an alias in a file of ours, which has none."""


def read_yaml_file(path: Path, *, aliases: bool = False) -> YamlFile:
    """Reads a configuration file.

    Args:
        path: The file.
        aliases: Whether it may have anchors, aliases and merge keys, as other trainers' files do.

    Raises:
        AliasError: If it has some, and may not.
        ConfigError: If the file cannot be read, is not UTF-8 or is not plain YAML.
    """
    try:
        refuse_other_than_yaml(path)
        raw = file_bytes(path, YAML_BYTES)
    except FileNotFoundError:
        raise ConfigError(
            f"the configuration file {path} does not exist{near_name(path)}"
        ) from None
    except (OSError, ValueError) as err:
        reason = getattr(err, "strerror", None) or str(err)
        raise ConfigError(f"the configuration file {path} cannot be read: {reason}") from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as err:
        if raw.startswith(UTF_16):
            raise ConfigError(f"{path} is UTF-16 text: save it as UTF-8") from None
        line = raw[: err.start].count(b"\n") + 1
        raise ConfigError(f"{path} (line {line}) is not UTF-8 text: save it as UTF-8") from None
    return parse_yaml_mapping(text, path.name, aliases=aliases)


def parse_yaml_mapping(text: str, name: str, *, aliases: bool = False) -> YamlFile:
    """Parses a document whose top level is a mapping; ``name`` stands in error messages."""
    node = _compose(text, name, aliases=aliases)
    if node is None:
        raise ConfigError(f"{name} is empty: it needs at least a section 'model' with 'path'")
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(
            f"{name} must hold sections such as 'model:' and 'lora:' at its top level"
        )
    result = YamlFile()
    result.values = _construct(node, (), name, result.lines)
    return result


def parse_yaml_value(text: str, name: str) -> Any:
    """Parses one value, as it stands after the ``=`` of an override."""
    if len(text) > YAML_BYTES:
        raise ConfigError(f"{name[:80]}... is longer than {YAML_BYTES:,} characters")
    node = _compose(text, name)
    return None if node is None else _construct(node, (), name, {})


def _compose(text: str, name: str, *, aliases: bool = False) -> yaml.Node | None:
    try:
        node = _compose_plain(text, name, aliases=aliases)
        return written_out(node, name) if aliases and node is not None else node
    except yaml.MarkedYAMLError as err:
        raise ConfigError(f"{name}{place_of(err)} is not valid YAML: {explain(err)}") from None
    except yaml.reader.ReaderError as err:
        line = text[: err.position].count("\n") + 1
        code = err.character if isinstance(err.character, int) else ord(err.character)
        raise ConfigError(
            f"{name} (line {line}) holds the control character U+{code:04X}: remove it"
        ) from None


def _compose_plain(text: str, name: str, *, aliases: bool) -> yaml.Node | None:
    """Composes one document after refusing, on its events, what would not be plain."""
    documents = depth = nodes = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = event.start_mark.line + 1 if event.start_mark else 0
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise ConfigError(f"{name} (line {line}) starts a second document: keep one")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > YAML_DEPTH:  # deeper ones take quadratic time, then exhaust the stack
            raise ConfigError(f"{name} (line {line}) is nested too deeply")
        nodes += isinstance(event, yaml.NodeEvent)
        if nodes > YAML_NODES:  # each takes a tenth of a millisecond
            raise ConfigError(
                f"{name} (line {line}) has more than {YAML_NODES:,} keys and values, so it is no "
                "configuration"
            )
        is_alias = isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None
        if is_alias and not aliases:
            raise AliasError(
                f"{name} (line {line}) uses an anchor or alias (& or *), which is not read: "
                "write the value out, in quotes if it begins with & or *"
            )
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise ConfigError(
                f"{name} (line {line}) uses the tag {tag!r}, which is not read: "
                "write the plain value, in quotes if it begins with !"
            )
    node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    return node


def _construct(
    node: yaml.Node, path: tuple[str, ...], name: str, lines: dict[tuple[str, ...], int]
) -> Any:
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node, name)
    if isinstance(node, yaml.SequenceNode):
        return [_construct(child, (*path, "[]"), name, lines) for child in node.value]
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{name} (line {line}) has a key that is not plain text")
        key = key_node.value
        if len(key) > YAML_KEY or not key.isprintable():
            raise ConfigError(
                f"{name} (line {line}) has a key that is longer than {YAML_KEY} characters or "
                "holds a control character"
            )
        key_path = (*path, key)
        if key in values:
            raise ConfigError(
                f"{name} (line {line}) sets '{'.'.join(key_path)}' again: "
                f"it is already set in line {lines[key_path]}"
            )
        lines[key_path] = line
        values[key] = _construct(value_node, key_path, name, lines)
    return values


def _scalar(node: yaml.ScalarNode, name: str) -> Any:
    text: str = node.value
    if node.style is not None:  # quoted or a block of text
        return text
    return plain_scalar(text, f"{name} (line {node.start_mark.line + 1})")


def plain_scalar(text: str, where: str = "the value") -> Any:
    """The meaning of an unquoted scalar: null, a truth value, a number, or else text."""
    if text in _NULL:
        return None
    if text in (text.lower(), text.capitalize(), text.upper()) and text.lower() in _BOOL:
        return _BOOL[text.lower()]
    if _INT.fullmatch(text):
        try:
            return int(text.replace("_", ""))
        except ValueError:
            raise ConfigError(f"{where} holds a number with too many digits") from None
    if _FLOAT.fullmatch(text):
        bare = text.replace("_", "").lower()
        return float(bare.replace(".inf", "inf").replace(".nan", "nan"))
    return text


class _Dumper(yaml.SafeDumper):
    """Writes lists in one line and quotes text that this module or PyYAML would take for more."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    try:
        means_more = plain_scalar(text) != text
    except ConfigError:
        means_more = True
    # A quoted line keeps line breaks of every kind; a block would not keep "\r" or "\x85".
    style = '"' if means_more or any(c < " " or c in "\x85\u2028\u2029" for c in text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _represent_list(dumper: yaml.SafeDumper, items: list[Any]) -> yaml.SequenceNode:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(list, _represent_list)


def dump_yaml(values: Mapping[str, Any]) -> str:
    """Writes nested mappings as block-style YAML that this module reads back to equal values."""
    return yaml.dump(
        dict(values),
        Dumper=_Dumper,
        sort_keys=False,
        default_flow_style=False,
        allow_unicode=True,
        width=2**31,
    )
