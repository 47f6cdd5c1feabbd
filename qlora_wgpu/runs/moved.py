"""A run that goes on in another place: its model and data are found where they are now.

What is found is only a guess by name. The run's checkpoints hold hashes of the base, the data and
the adapter that it began from, so anything else under that name is refused.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from qlora_wgpu.checkpoint.model_folder import GGUF
from qlora_wgpu.config import Config
from qlora_wgpu.config.as_trained import changed
from qlora_wgpu.config.loading import PATH_KEYS
from qlora_wgpu.config.paths import DataPlace
from qlora_wgpu.data.sources import place_of
from qlora_wgpu.errors import ConfigError, command
from qlora_wgpu.presence import exists, is_file
from qlora_wgpu.runs.locating import is_nowhere
from qlora_wgpu.runs.settings import is_lost_template
from qlora_wgpu.training import Observer, checkpoint_folders

_MARKS = {"model.path": "config.json", "lora.init_from": "adapter_config.json"}
_DATA = ("data.train", "data.eval", "data.sources")


def found_again(settings: Config, observer: Observer) -> Config:
    """The settings of a run that goes on, with each path that is not there where it is now.

    The end of a path is looked for in the folders around the run and in the current one: of
    ``/home/ann/poems/data/train.jsonl`` first ``data/train.jsonl``, say, and then ``train.jsonl``.

    Args:
        settings: Those of the run; without a checkpoint there is nothing to compare with.
        observer: Is told what was found.

    Raises:
        ConfigError: If something is nowhere; says how to name it.
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
