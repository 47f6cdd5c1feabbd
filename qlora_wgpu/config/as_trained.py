"""How an adapter was trained, from the config.yaml that its run keeps beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from qlora_wgpu.config.loading import load_config
from qlora_wgpu.config.paths import RunPaths, run_around
from qlora_wgpu.config.problems import new_names
from qlora_wgpu.config.schema import Config

SECTIONS = ("quant", "train", "device")
"""The sections that decide how a base and an adapter are opened; they are always taken whole."""

Changes = Mapping[str, Mapping[str, Any]]
"""Values by section and key."""


def find_run(adapter: str | PathLike[str]) -> Path | None:
    """The folder of the run that an adapter belongs to, or None where it lies in none."""
    run = run_around(Path(adapter).expanduser().resolve())
    return run if RunPaths(run).is_run else None


def config_of_run(run: Path) -> Config:
    """The settings that a run keeps."""
    return load_config(RunPaths(run).config)


def as_trained(settings: Config, adapter: str | PathLike[str], explicit: Changes) -> Config:
    """The settings with what decides how a model is opened as the adapter's run had it."""
    run = find_run(adapter)
    if run is not None:
        trained = config_of_run(run)
        settings = settings.model_copy(update={name: getattr(trained, name) for name in SECTIONS})
    return changed(settings, explicit)


def changed(settings: Config, changes: Changes) -> Config:
    """The settings with some values changed."""
    sections = {
        name: getattr(settings, name).model_copy(update=values) for name, values in changes.items()
    }
    return settings.model_copy(update=sections)


def without_none(changes: Changes) -> Changes:
    """The changes that are given; a value of None stands for none."""
    return {
        section: {key: value for key, value in values.items() if value is not None}
        for section, values in changes.items()
    }


def explicit_in(settings: Config, overrides: Sequence[str]) -> Changes:
    """The values of ``SECTIONS`` that overrides have put into settings."""
    changes: dict[str, dict[str, Any]] = {}
    for text in overrides:
        section, _, key = text.partition("=")[0].strip().partition(".")
        key = new_names(section).get(key, key)
        if section in SECTIONS:
            changes.setdefault(section, {})[key] = getattr(getattr(settings, section), key)
    return changes
