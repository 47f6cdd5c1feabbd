"""Checked settings from a YAML file, from overrides and from the run of an adapter."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import ValidationError

from qlora_wgpu.config.dialects.conversion import dialect_of
from qlora_wgpu.config.names import key_for, reason_for
from qlora_wgpu.config.paths import RunPaths, resolve_path, run_around
from qlora_wgpu.config.schema import Config, sections
from qlora_wgpu.config.section import (
    Problem,
    Section,
    config_error,
    in_quotes,
    new_name,
    new_names,
    plain,
    problems_of,
    shown,
    with_new_names,
)
from qlora_wgpu.config.sections.data import SourceConfig
from qlora_wgpu.config.sections.train import has_default_beta2
from qlora_wgpu.config.yaml import AliasError, YamlFile, parse_yaml_value, read_yaml_file
from qlora_wgpu.errors import ConfigError, brief
from qlora_wgpu.limits import PROBLEMS_SHOWN

# ---- files and overrides -------------------------------------------------------------------------

_SPACELESS = re.compile(r"([\w\"']):(?=[^\s:])")

PATH_KEYS = (
    ("model", "path"),
    ("data", "train"),
    ("data", "eval"),
    ("data", "chat_template"),
    ("lora", "init_from"),
    ("output", "dir"),
)

Overrides = Sequence[str] | Mapping[str, Any]


def load_config(path: str | os.PathLike[str], overrides: Overrides = ()) -> Config:
    """Reads a configuration file, applies overrides and checks everything.

    Relative paths are looked up in the file's folder, then in the current directory (the other way
    round for overrides); a ``model.path`` that is in neither is a name on the Hub. ``output.dir``
    is relative to the current directory, or to the file's folder if it begins with ``./`` or
    ``../``.

    Args:
        path: The YAML file.
        overrides: Strings such as ``"optim.learning_rate=1e-4"``, the last of which win over
            earlier ones and over the file. Values are YAML; text needs no quotes. Or a mapping of
            values by key, dotted key or section: ``{"learning_rate": 1e-4}``.

    Raises:
        ConfigError: If the file cannot be read, or a key is unknown or a value invalid.
    """
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(
            f"load_config expects the path of a YAML file, got {type(path).__name__}: for a "
            "mapping of sections, use Config(**sections)"
        )
    path = Path(path)
    file = _read(path)
    if not isinstance(overrides, list | tuple | Mapping):
        raise ConfigError(
            "overrides must be a list of strings such as 'train.max_steps=10', or a mapping, got "
            f"{brief(overrides)}"
        )
    values, errors = _split_sections(file, path.name)
    origin: dict[tuple[str, ...], str] = {}
    is_default_beta2 = has_default_beta2(values.get("optim", {}))
    if isinstance(overrides, Mapping):
        for location, value in located(overrides).items():
            _put(values, location, plain(value))
            origin[location] = f"{'.'.join(location)}={shown(value)}"
        overrides = ()
    for text in overrides:
        try:
            loc, value = _parse_override(text)
        except ConfigError as err:
            errors.append(str(err))
            continue
        _put(values, loc, value)
        origin[loc[:2]] = text
    if is_default_beta2 and ("optim", "name") in origin and ("optim", "adam_beta2") not in origin:
        del values["optim"]["adam_beta2"]  # another optimizer has its own default

    source = f"{path} with its overrides" if origin or overrides else str(path)
    _resolve_paths(values, set(origin), path.parent)
    try:
        config = Config.__pydantic_validator__.validate_python(values)
    except ValidationError as err:
        invalid = [
            problem.sentence(_where(problem, file, path.name, origin))
            for problem in problems_of(err, suggest_key)
            if problem.kind != "missing" or problem.key not in file.values  # reported above
        ]
        raise _error(path, file, errors + invalid, source) from None
    if errors:
        raise _error(path, file, errors, source)
    assert isinstance(config, Config)
    return config


def _read(path: Path) -> YamlFile:
    try:
        return read_yaml_file(path)
    except AliasError as err:
        try:
            file = read_yaml_file(path, aliases=True)  # which other trainers' files may have
        except ConfigError:
            raise err from None
        raise _error(path, file, [str(err)], str(path)) from None


def with_settings(config: Config | Mapping[str, Any], settings: Mapping[str, Any]) -> Config:
    """A configuration with settings changed and checked, and with absolute paths."""
    before = config.model_dump() if isinstance(config, Config) else config
    values = {
        name: dict(part) if isinstance(part, Mapping | Section) else part
        for name, part in before.items()
    }
    changes = located(settings)
    if isinstance(config, Config) and ("optim", "name") in changes and not config.optim.sets_beta2:
        del values["optim"]["adam_beta2"]  # another optimizer has its own default
    for (section, key), value in changes.items():
        values[section] = {**(values.get(section) or {}), key: plain(value)}
    _resolve_paths(values, set(), Path())
    if isinstance(config, Config) and not changes and values == before:
        return config
    return Config.model_validate(values)


def _error(path: Path, file: YamlFile, sentences: Sequence[str], source: str) -> ConfigError:
    dialect = dialect_of(file.values)
    if dialect is None:
        return config_error(sentences, source)
    return ConfigError(
        f"{path} is a configuration of {dialect.name}: convert it with `qlora-wgpu init --from "
        f"{path}`"
    )


def _where(problem: Problem, file: YamlFile, name: str, origin: dict[tuple[str, ...], str]) -> str:
    if problem.kind == "missing":
        return f" in {name}"
    if problem.loc[:2] in origin:
        return f" in the override {in_quotes(origin[problem.loc[:2]])}"
    loc = problem.loc
    while loc and loc not in file.lines:
        loc = loc[:-1]
    return f" in {name} (line {file.lines[loc]})" if loc else f" in {name}"


def _split_sections(file: YamlFile, name: str) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The known sections as dictionaries, and errors about all other keys at the top."""
    values: dict[str, dict[str, Any]] = {}
    errors: list[str] = []
    keys = sections()
    for key, value in file.values.items():
        where = f" in {name} (line {file.lines[(key,)]})"
        if key not in keys:
            suggestion = suggest_key((key,)) if len(errors) < PROBLEMS_SHOWN else ""  # it is slow
            errors.append(Problem((key,), "unknown", suggestion).sentence(where))
        elif value is None:  # a section whose keys are all commented out
            values[key] = {}
        elif isinstance(value, dict):
            values[key] = with_new_names(key, value)
            for old, new in new_names(key).items():  # so that messages name its line
                if old in value:
                    file.lines.setdefault((key, new), file.lines[(key, old)])
        else:
            errors.append(
                f"{key}{where} must be a section with keys such as {', '.join(keys[key][:2])}, "
                f"got {shown(value)}"
            )
    if "model" not in values and "model" not in file.values:
        values["model"] = {}  # so that the message names model.path
    return values, errors


def _put(values: dict[str, dict[str, Any]], loc: tuple[str, ...], value: Any) -> None:
    """Sets a key, or an entry of a key's mapping."""
    section = values.setdefault(loc[0], {})
    if len(loc) == 2:
        section[loc[1]] = value
        return
    before = section.get(loc[1])
    section[loc[1]] = {**(before if isinstance(before, dict) else {}), loc[2]: value}


def _parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    key, equals, raw = text.partition("=")
    key = key.strip()
    if not equals or key.startswith("-"):
        raise ConfigError(f"the override {in_quotes(text)} must have the form section.key=value")
    section, dot, leaf = key.partition(".")
    leaf, entry_dot, entry = leaf.partition(".")
    keys = sections()
    leaf = new_name(section, leaf)
    is_key = section in keys and leaf in keys[section]
    if entry_dot and is_key and entry and _holds_mapping(section, leaf):
        return (section, leaf, entry), _override_value(section, leaf, raw.strip(), text, entry=True)
    if not dot or entry_dot or not is_key:
        if section in keys and not dot:
            raise ConfigError(
                f"the override {in_quotes(text)} names a section: set its keys, "
                f"such as {section}.{keys[section][0]}=..."
            )
        loc = (section, leaf) if section in keys and not entry_dot else (key,)
        raise ConfigError(
            f"unknown key '{key}' in the override {in_quotes(text)}{suggest_key(loc)}"
        )
    return (section, leaf), _override_value(section, leaf, raw.strip(), text)


def _annotation(section: str, leaf: str) -> Any:
    model: Any = Config.model_fields[section].annotation
    return model.model_fields[leaf].annotation


def _holds_mapping(section: str, leaf: str) -> bool:
    return get_origin(_annotation(section, leaf)) is dict


def _override_value(section: str, leaf: str, raw: str, text: str, *, entry: bool = False) -> Any:
    """YAML, except that a text key keeps what was typed: a folder may be called 2024 or a: b."""
    annotation = _annotation(section, leaf)
    holds_text = _holds_text(get_args(annotation)[1] if entry else annotation)
    if not entry and _holds_mapping(section, leaf):
        raw = _SPACELESS.sub(r"\1: ", raw)  # {a:1}, since shells split at spaces
    try:
        value = parse_yaml_value(raw, f"the override {in_quotes(text)}")
    except ConfigError:
        if not holds_text:
            raise
        return raw
    is_path = (section, leaf) in PATH_KEYS and leaf != "chat_template"
    if is_path and isinstance(value, list) and not os.path.lexists(raw):
        return value  # an error
    quoted = raw[:1] in ("'", '"')
    if holds_text and value is not None and not (quoted and isinstance(value, str)):
        return raw
    return value


def _holds_text(annotation: Any) -> bool:
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (dict, list):
        return False
    options = [annotation] if annotation is str else get_args(annotation)
    bare = {get_args(o)[0] if get_origin(o) is Annotated else o for o in options}
    return str in bare and bare <= {str, type(None)}


def _resolve_paths(values: dict[str, Any], overridden: set[tuple[str, ...]], folder: Path) -> None:
    """Makes paths absolute in values that are not yet validated."""
    here = Path.cwd()

    def resolved(key: str, given: Any, location: Location) -> Any:
        path = plain(given)
        if not isinstance(path, str) or not path:
            return given
        bases = (here, folder) if location in overridden else (folder, here)
        return resolve_path(key, path, bases)

    def source(each: Any) -> Any:
        given = dict(each) if isinstance(each, Mapping | Section) else {}
        if "path" not in given:
            return each
        return {**given, "path": resolved("data.train", given["path"], ("data", "sources"))}

    for section, leaf in PATH_KEYS:
        part = values.get(section)
        if isinstance(part, dict) and leaf in part:
            part[leaf] = resolved(f"{section}.{leaf}", part[leaf], (section, leaf))
    data = values.get("data")
    if isinstance(data, dict) and isinstance(data.get("sources"), list):
        data["sources"] = [source(each) for each in data["sources"]]
    grpo = values.get("grpo")
    if isinstance(grpo, dict) and isinstance(grpo.get("reward_funcs"), list):
        location = ("grpo", "reward_funcs")

        def function(each: Any) -> Any:
            if isinstance(each, Mapping) and "reward_model" in each:
                given = each["reward_model"]
                if isinstance(given, str):
                    given = {"path": given}
                if not isinstance(given, Mapping) or "path" not in given:
                    return each
                place = resolved("grpo.reward_funcs", given["path"], location)
                return {**each, "reward_model": {**given, "path": place}}
            path, colon, name = each.rpartition(":") if isinstance(each, str) else ("", "", "")
            if not path.endswith(".py"):
                return each
            return f"{resolved('grpo.reward_funcs', path, location)}{colon}{name}"

        grpo["reward_funcs"] = [function(each) for each in grpo["reward_funcs"]]


# ---- the run of an adapter -----------------------------------------------------------------------

MODEL_SECTIONS = ("quant", "train", "device")
"""The sections that decide how a base and an adapter are opened."""

Changes = Mapping[str, Mapping[str, Any]]
"""Values by section and key."""


def find_run(adapter: str | os.PathLike[str]) -> Path | None:
    """The folder of the run that an adapter belongs to, or None."""
    run = run_around(Path(adapter).expanduser().resolve())
    return run if RunPaths(run).is_run else None


def config_of_run(run: Path) -> Config:
    """The settings of a run, from its config.yaml."""
    return load_config(RunPaths(run).config)


def as_trained(settings: Config, adapter: str | os.PathLike[str], explicit: Changes) -> Config:
    """The settings with ``MODEL_SECTIONS`` from the adapter's run, apart from explicit ones."""
    run = find_run(adapter)
    if run is not None:
        trained = config_of_run(run)
        sections_of_run = {name: getattr(trained, name) for name in MODEL_SECTIONS}
        settings = settings.model_copy(update=sections_of_run)
    return changed(settings, explicit)


def changed(settings: Config, changes: Changes) -> Config:
    """The settings with some values changed."""
    update = {
        name: getattr(settings, name).model_copy(update=values) for name, values in changes.items()
    }
    return settings.model_copy(update=update)


def without_none(changes: Changes) -> Changes:
    """The changes without those to None, which were not given."""
    return {
        section: {key: value for key, value in values.items() if value is not None}
        for section, values in changes.items()
    }


def explicit_in(settings: Config, overrides: Sequence[str]) -> Changes:
    """The values in ``MODEL_SECTIONS`` that overrides have set."""
    changes: dict[str, dict[str, Any]] = {}
    for text in overrides:
        section, _, key = text.partition("=")[0].strip().partition(".")
        key = new_names(section).get(key, key)
        if section in MODEL_SECTIONS:
            changes.setdefault(section, {})[key] = getattr(getattr(settings, section), key)
    return changes


# ---- values by section and key -------------------------------------------------------------------

Location = tuple[str, str]


def located(settings: Mapping[str, Any]) -> dict[Location, Any]:
    """Values by section and key, from settings by dotted key, by section, or by key alone."""
    values: dict[Location, Any] = {}
    for name, value in settings.items():
        for location, part in _expanded(name, value):
            if location in values:
                raise ConfigError(f"{'.'.join(location)} is set twice: set it once")
            values[location] = part
    return values


def _expanded(name: str, value: Any) -> Iterator[tuple[Location, Any]]:
    section, dot, key = name.partition(".")
    if dot:
        yield _checked_location(section, key), value
    elif name == "device" and isinstance(value, str | int) and not isinstance(value, bool):
        yield ("device", "gpu"), str(value)  # as in from_pretrained
    elif name in sections() and isinstance(value, Mapping):
        for inner, part in value.items():
            yield _checked_location(name, str(inner)), part
    else:
        yield _location_of(name, value), value


def _checked_location(section: str, key: str) -> Location:
    key = new_name(section, key)
    if key not in sections().get(section, ()):
        location = (section, key) if section in sections() else (f"{section}.{key}",)
        raise ConfigError(f"unknown setting '{section}.{key}'{suggest_key(location)}")
    return section, key


def _location_of(name: str, value: Any) -> Location:
    having = [section for section, keys in sections().items() if name in keys]
    if len(having) > 1:
        dotted = " or ".join(f"'{section}.{name}'" for section in having)
        raise ConfigError(f"several sections have a setting '{name}': use {dotted}")
    if having:
        return having[0], name
    if name in sections():
        keys = sections()[name]
        raise ConfigError(
            f"'{name}' is a section: pass its settings as a mapping such as "
            f"{{'{keys[0]}': ...}}, got {shown(value)}"
        )
    raise ConfigError(f"unknown setting '{name}'{suggest_key((name,))}")


# ---- suggestions for unknown keys ----------------------------------------------------------------

_OPPOSITES = (("train", "eval"), ("min", "max"), ("beta1", "beta2"), ("steps", "epochs"))


def suggest_key(loc: tuple[str, ...]) -> str:
    """The end of the sentence about an unknown key such as ``("lora", "rank")``."""
    keys = sections()
    if loc[:2] == ("data", "sources"):
        fields = list(SourceConfig.model_fields)
        near = _near(loc[-1], fields)
        return f": did you mean {near!r}?" if near else f": its keys are {', '.join(fields)}"
    if len(loc) > 2:
        return ""
    leaf = loc[-1].lower().replace("-", "_")
    top = len(loc) == 1
    section, dot, rest = leaf.partition(".") if top else (loc[0], "", "")
    if dot and rest in keys.get(section, ()):
        return f": write '{rest}' under the section '{section}'"
    synonym, reason = key_for(leaf), reason_for(leaf)
    if not top and leaf in keys[section]:  # it differs only in case or hyphens
        return _did_you_mean(section, leaf)
    if not top and synonym and synonym[0] == section:  # optim.scheduler, not cluster.scheduler
        return _did_you_mean(*synonym)
    for other, leaves in keys.items():
        if leaf in leaves:
            return f": it belongs in section '{other}'"
    near = _near(leaf, list(keys) if top else keys[section])
    if synonym and (top or not (reason or near)):
        return _did_you_mean(*synonym)
    if reason:
        return f": {reason}"
    if near:
        return f": did you mean the section '{near}'?" if top else _did_you_mean(section, near)
    everywhere = {name: section for section, leaves in keys.items() for name in leaves}
    if anywhere := _near(leaf, list(everywhere)):
        return _did_you_mean(everywhere[anywhere], anywhere)
    if top:
        return f": the sections are {', '.join(keys)}"
    return f": the keys of '{section}' are {', '.join(keys[section])}"


def _near(word: str, words: list[str]) -> str | None:
    candidates = [other for other in words if not _are_opposites(word, other)]
    return next(iter(difflib.get_close_matches(word, candidates, n=1, cutoff=0.7)), None)


def _are_opposites(word: str, other: str) -> bool:
    left, right = set(word.split("_")), set(other.split("_"))
    return any((a in left and b in right) or (b in left and a in right) for a, b in _OPPOSITES)


def _did_you_mean(section: str, leaf: str) -> str:
    return f": did you mean '{section}.{leaf}'?"
