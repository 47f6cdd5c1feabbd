"""Configurations in any form, also of a run that has moved, and the adapter a run starts from."""

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
from qlora_wgpu.config.sections.grpo import reward_model_in
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
"""Environment variable: files that may name other machines, separated as in PATH."""

AnyConfig = Config | str | PathLike[str] | Mapping[str, Any]


def as_config(config: AnyConfig, overrides: Overrides = ()) -> Config:
    """Reads and checks a ``Config``, a YAML file, a run's folder, or a mapping of sections.

    Overrides are values by key, dotted key or section, or for a YAML file strings such as
    ``"train.max_steps=10"``.
    """
    if isinstance(config, str | PathLike):
        folder = Path(config).expanduser()
        if RunPaths(folder).is_run:
            return _of_run(folder, overrides)
        return load_config(config, overrides)
    if not isinstance(config, Config | Mapping):
        raise ConfigError(
            "a configuration must be a Config, the path of a YAML file or a mapping with its "
            f"sections, got {brief(config)}"
        )
    if isinstance(overrides, Mapping) or not overrides:
        return with_settings(config, overrides if isinstance(overrides, Mapping) else {})
    raise ConfigError(
        f"overrides such as {overrides[0]!r} need a YAML file: change the "
        f"{type(config).__name__} itself"
    )


def require_own_peers(config: AnyConfig, settings: Config, overrides: Overrides = ()) -> None:
    """Refuses a scheduler on another machine that only a file names, since it may run code here.

    The user must name it in an override, in Python, or in a file that
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
    overridden = _overridden(overrides)
    for key in ["scheduler"] + ["allow_plain_tcp"] * (address.protocol == "tcp"):
        value = getattr(settings.cluster, key)
        if value and ("cluster", key) not in overridden:
            text = f"cluster.{key}={json.dumps(value) if value is True else value}"
            raise ConfigError(
                f"{config} sets {text}, and whoever controls {address} could run code on this "
                f"machine: if you trust it, pass {text} as an override, or list the file in "
                f"{TRUSTED}"
            )


def _overridden(overrides: Overrides) -> set[tuple[str, str]]:
    if isinstance(overrides, Mapping):
        return set(located(overrides))
    keys = (text.partition("=")[0].strip().partition(".") for text in overrides)
    return {(section, key) for section, _, key in keys}


def _of_run(run: Path, overrides: Overrides) -> Config:
    """The settings of a run in its present folder; a missing chat template is its own copy."""
    settings = load_config(RunPaths(run).config, overrides)
    changes: dict[str, dict[str, Any]] = {}
    if ("output", "dir") not in _overridden(overrides):
        changes["output"] = {"dir": str(run)}
    kept = RunPaths(run).adapter / TEMPLATE
    if is_lost_template(settings.data.chat_template) and exists(kept):
        changes["data"] = {"chat_template": str(kept)}
    return changed(settings, changes)


def is_lost_template(template: str | None) -> bool:
    """Whether a chat template is a file that does not exist."""
    if template is None or template in BUILT_IN_CHAT_TEMPLATES or is_inline_template(template):
        return False
    return not exists(Path(template))


# ---- a run that has moved ------------------------------------------------------------------------

_MARKS = {"model.path": "config.json", "lora.init_from": "adapter_config.json"}
_DATA = ("data.train", "data.eval", "data.sources")


def relocate_paths(settings: Config, observer: Observer) -> Config:
    """The settings of a run to resume, with each missing path replaced by where it is now.

    The end of a path is searched in the folders above the run and in the current one: of
    ``/home/ann/poems/data/train.jsonl`` first ``data/train.jsonl``, say, and then ``train.jsonl``.
    That is a guess by name, which the observer gets as a note: other contents under that name are
    refused later, by the hashes in the run's checkpoints, except for reward models. Files of reward
    functions are code, so they are not searched.
    """
    run = Path(settings.output.dir)
    if not checkpoint_folders(run):
        return settings
    folders = (*run.absolute().parents, Path.cwd())
    missing: dict[str, str] = {}

    def located_path(name: str, path: str) -> str:
        if not _is_missing(name, path):
            return path
        found = _search(name, path, folders)
        if found is None:
            missing[name] = path
            return path
        observer.note(f"{name}: {path} does not exist, so {found} is used if its contents match")
        return found

    changes: dict[str, dict[str, Any]] = {}
    for section, key in PATH_KEYS:
        path = getattr(getattr(settings, section), key)
        if path is not None and (section, key) != ("output", "dir"):
            changes.setdefault(section, {})[key] = located_path(f"{section}.{key}", path)
    if settings.data.sources is not None:
        changes.setdefault("data", {})["sources"] = [
            source.model_copy(update={"path": located_path("data.sources", source.path)})
            for source in settings.data.sources
        ]
    functions = [
        {"reward_model": {**own, "path": located_path("grpo.reward_funcs", own["path"])}}
        if (own := reward_model_in(each)) is not None
        else each
        for each in settings.grpo.reward_funcs
    ]
    if functions:
        changes["grpo"] = {"reward_funcs": functions}
    if missing:
        raise ConfigError(_missing_paths(run, missing))
    return changed(settings, changes)


def _is_missing(name: str, path: str) -> bool:
    if name == "model.path":
        return is_nowhere(path)
    if name == "data.chat_template":
        return is_lost_template(path)
    place = place_of(path).path if name in _DATA else path
    return Path(place).is_absolute() and not exists(
        Path(place)
    )  # relative ones are names on the hub


def _search(name: str, path: str, folders: tuple[Path, ...]) -> str | None:
    """Where the longest possible end of a path exists."""
    place = DataPlace.parse(path) if name in _DATA else DataPlace(path)
    parts = re.split(r"[\\/]+", place.path)  # also of Windows
    for begin in range(1, len(parts)):
        for folder in folders:
            candidate = folder.joinpath(*parts[begin:])
            if _may_be(name, candidate):
                return f"{candidate}{place.ending}"
    return None


def _may_be(name: str, candidate: Path) -> bool:
    """Whether a path may be what a setting names, by the file that such a folder contains."""
    try:
        if name not in _MARKS:
            return exists(candidate)
        return is_file(candidate / _MARKS[name]) or (
            candidate.suffix == GGUF and is_file(candidate)
        )
    except OSError:  # a folder that cannot be read
        return False


def _missing_paths(run: Path, missing: dict[str, str]) -> str:
    named = " and ".join(f"{name} {path}" for name, path in missing.items())
    verb, pronoun = ("does", "it has") if len(missing) == 1 else ("do", "they have")
    if command():
        advice = f"add {' '.join(f'{name}=PATH' for name in missing)}"
    else:
        advice = f"set {' and '.join(missing)}"
    return (
        f"the run in {run} was trained with {named}, which {verb} not exist: if {pronoun} moved, "
        f"{advice}; the contents must be the same"
    )


# ---- lora.init_from ------------------------------------------------------------------------------


def require_init_from(lora: LoraConfig) -> None:
    """Checks that the adapter exists, before anything takes time."""
    if lora.init_from is not None:
        with named_init_from():
            require_adapter_files(lora.init_from)


def check_init_from(base: Pretrained, lora: LoraConfig) -> None:
    """Checks that the adapter fits the base, before data and weights are read."""
    if lora.init_from is not None:
        own = AdapterLayout.of(base.architecture, lora)
        with named_init_from():
            tensors, _ = read_fitting(lora.init_from, own, base.architecture, base.name_or_path)
            own.join(tensors)


def load_init_from(model: AdapterModel, lora: LoraConfig) -> None:
    """Loads the adapter into a model, if there is one."""
    if lora.init_from is not None:
        with named_init_from():
            model.load_adapter(lora.init_from)


@contextmanager
def named_init_from() -> Iterator[None]:
    """While it is entered, errors about an adapter name the setting lora.init_from."""
    try:
        yield
    except CheckpointError as err:
        raise type(err)(f"lora.init_from: {err}") from err
