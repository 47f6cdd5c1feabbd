"""A configuration in whichever form it was given, also of a run that has moved."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from qlora_wgpu.checkpoint.model_folder import GGUF
from qlora_wgpu.checkpoint.tokenizer_files import TEMPLATE
from qlora_wgpu.cluster.security import Address
from qlora_wgpu.config import Config, LoraConfig, load_config
from qlora_wgpu.config.loading import PATH_KEYS, Overrides, changed, located, with_settings
from qlora_wgpu.config.paths import BUILT_IN_CHAT_TEMPLATES, DataPlace, RunPaths, is_inline_template
from qlora_wgpu.data.sources import place_of
from qlora_wgpu.errors import CheckpointError, ConfigError, brief, command
from qlora_wgpu.files import exists, is_file
from qlora_wgpu.lora.layout import AdapterLayout
from qlora_wgpu.lora.peft_files import require_adapter_files
from qlora_wgpu.model.adapter_model import AdapterModel
from qlora_wgpu.model.adapter_state import read_fitting
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.runs.resolve import is_nowhere
from qlora_wgpu.training import Observer, checkpoint_folders

# ---- configurations in any form ------------------------------------------------------------------

TRUSTED = "QLORA_WGPU_TRUSTED_CONFIGS"
"""The environment's name of files that may name other machines, apart as in PATH."""

AnyConfig = Config | str | PathLike[str] | Mapping[str, Any]


def as_config(config: AnyConfig, overrides: Overrides = ()) -> Config:
    """Reads and checks a ``Config``, a YAML file, a run's folder, or a mapping of sections.

    Overrides are values by key, dotted key or section; or, for a YAML file, texts such as
    ``"train.max_steps=10"``.
    """
    if isinstance(config, str | PathLike):
        folder = Path(config).expanduser()
        if RunPaths(folder).is_run:
            return _of_run(folder, overrides)
        return load_config(config, overrides)
    if not isinstance(config, Config | Mapping):
        raise ConfigError(
            "a configuration is a Config, the path of a YAML file or a mapping with its sections, "
            f"got {brief(config)}"
        )
    if isinstance(overrides, Mapping) or not overrides:
        return with_settings(config, overrides if isinstance(overrides, Mapping) else {})
    raise ConfigError(
        f"overrides such as {overrides[0]!r} belong to a YAML file: change the "
        f"{type(config).__name__} itself"
    )


def require_own_peers(config: AnyConfig, settings: Config, overrides: Overrides = ()) -> None:
    """Refuses a scheduler on another machine that a file alone names: it may run code here.

    It counts where the user has named it: in an override, in Python, or in a file that
    ``QLORA_WGPU_TRUSTED_CONFIGS`` lists.
    """
    scheduler = settings.cluster.scheduler
    if not isinstance(config, str | PathLike) or scheduler in (None, "local"):
        return
    address = Address.parse(str(scheduler))
    listed = os.environ.get(TRUSTED, "").split(os.pathsep)
    trusted = {Path(name).expanduser().resolve() for name in listed if name}
    file = Path(config).expanduser().resolve()
    if address.is_loopback or not trusted.isdisjoint((file, RunPaths(file).config)):
        return
    named = _overridden(overrides)
    asks = ["scheduler"] + ["allow_plain_tcp"] * (address.protocol == "tcp")
    for key in asks:
        value = getattr(settings.cluster, key)
        if value and ("cluster", key) not in named:
            text = f"cluster.{key}={json.dumps(value) if value is True else value}"
            raise ConfigError(
                f"{config} alone says {text}, and whoever is at {address} could run code on this "
                f"machine: if you trust it, say {text} in an override, or name the file in "
                f"{TRUSTED}"
            )


def _overridden(overrides: Overrides) -> set[tuple[str, str]]:
    """The keys that overrides give."""
    if isinstance(overrides, Mapping):
        return set(located(overrides))
    keys = (text.partition("=")[0].strip().partition(".") for text in overrides)
    return {(section, key) for section, _, key in keys}


def _of_run(run: Path, overrides: Overrides) -> Config:
    """The settings of a run, wherever its folder is now, with the chat template that it keeps."""
    settings = load_config(RunPaths(run).config, overrides)
    changes: dict[str, dict[str, Any]] = {}
    if ("output", "dir") not in _overridden(overrides):
        changes["output"] = {"dir": str(run)}
    kept = RunPaths(run).adapter / TEMPLATE
    if is_lost_template(settings.data.chat_template) and exists(kept):
        changes["data"] = {"chat_template": str(kept)}
    return changed(settings, changes)


def is_lost_template(template: str | None) -> bool:
    """Whether a chat template is a file that is not there any more."""
    if template is None or template in BUILT_IN_CHAT_TEMPLATES or is_inline_template(template):
        return False
    return not exists(Path(template))


# ---- a run that has moved ------------------------------------------------------------------------

_MARKS = {"model.path": "config.json", "lora.init_from": "adapter_config.json"}
_DATA = ("data.train", "data.eval", "data.sources")


def found_again(settings: Config, observer: Observer) -> Config:
    """The settings of a run that goes on, with each path that is not there where it is now.

    The end of a path is looked for in the folders around the run and in the current one: of
    ``/home/ann/poems/data/train.jsonl`` first ``data/train.jsonl``, say, and then ``train.jsonl``.
    That is a guess by name, told to the observer: the run's checkpoints hold hashes of the base,
    the data and the adapter that it began from, so anything else under that name is refused later.
    """
    run = Path(settings.output.dir)
    if not checkpoint_folders(run):
        return settings
    places = (*run.absolute().parents, Path.cwd())
    missing: dict[str, str] = {}

    def settled(name: str, path: str) -> str:
        if not _is_missing(name, path):
            return path
        found = _found(name, path, places)
        if found is None:
            missing[name] = path
            return path
        observer.note(f"{name}: {path} is not there, so {found} is used if its contents match")
        return found

    changes: dict[str, dict[str, Any]] = {}
    for section, key in PATH_KEYS:
        path = getattr(getattr(settings, section), key)
        if path is not None and (section, key) != ("output", "dir"):
            changes.setdefault(section, {})[key] = settled(f"{section}.{key}", path)
    if settings.data.sources is not None:
        changes.setdefault("data", {})["sources"] = [
            source.model_copy(update={"path": settled("data.sources", source.path)})
            for source in settings.data.sources
        ]
    if missing:
        raise ConfigError(_sentence(run, missing))
    return changed(settings, changes)


def _is_missing(name: str, path: str) -> bool:
    if name == "model.path":
        return is_nowhere(path)
    if name == "data.chat_template":
        return is_lost_template(path)
    place = place_of(path).path if name in _DATA else path
    return Path(place).is_absolute() and not exists(Path(place))  # others are names on the hub


def _found(name: str, path: str, places: tuple[Path, ...]) -> str | None:
    """Where the longest end of a path is."""
    place = DataPlace.parse(path) if name in _DATA else DataPlace(path)
    parts = re.split(r"[\\/]+", place.path)  # of Windows, too
    for begin in range(1, len(parts)):
        for folder in places:
            candidate = folder.joinpath(*parts[begin:])
            if _is_such(name, candidate):
                return f"{candidate}{place.ending}"
    return None


def _is_such(name: str, candidate: Path) -> bool:
    """Whether something may be what a setting names, by what a folder of that kind holds."""
    try:
        if name not in _MARKS:
            return exists(candidate)
        return is_file(candidate / _MARKS[name]) or (
            candidate.suffix == GGUF and is_file(candidate)
        )
    except OSError:  # a folder that may not be looked into
        return False


def _sentence(run: Path, missing: dict[str, str]) -> str:
    named = " and ".join(f"{name} {path}" for name, path in missing.items())
    verb, pronoun = ("is", "it was") if len(missing) == 1 else ("are", "they were")
    if command():
        advice = f"add {' '.join(f'{name}=PATH' for name in missing)}"
    else:
        advice = f"set {' and '.join(missing)}"
    return (
        f"the run in {run} was trained with {named}, which {verb} not there: if {pronoun} moved, "
        f"{advice}; the contents must be the same"
    )


# ---- the adapter that a run goes on from ---------------------------------------------------------


def require_init_from(lora: LoraConfig) -> None:
    """Makes sure that the adapter is there, before anything takes time."""
    if lora.init_from is not None:
        with named_init_from():
            require_adapter_files(lora.init_from)


def check_init_from(base: Pretrained, lora: LoraConfig) -> None:
    """Makes sure that the adapter fits, before data and weights are read."""
    if lora.init_from is not None:
        own = AdapterLayout.of(base.architecture, lora)
        with named_init_from():
            tensors, _ = read_fitting(lora.init_from, own, base.architecture, base.name_or_path)
            own.join(tensors)


def load_init_from(model: AdapterModel, lora: LoraConfig) -> None:
    """Gives a model the adapter, where the run has one to go on from."""
    if lora.init_from is not None:
        with named_init_from():
            model.load_adapter(lora.init_from)


@contextmanager
def named_init_from() -> Iterator[None]:
    """While it is entered, errors about an adapter say which setting named it."""
    try:
        yield
    except CheckpointError as err:
        raise type(err)(f"lora.init_from: {err}") from err
