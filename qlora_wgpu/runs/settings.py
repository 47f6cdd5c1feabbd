"""A configuration in whichever form it was given."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from qlora_wgpu.checkpoint.tokenizer_files import TEMPLATE
from qlora_wgpu.cluster.addresses import Address
from qlora_wgpu.config import Config, load_config
from qlora_wgpu.config.as_trained import changed, is_run
from qlora_wgpu.config.loading import Overrides, with_settings
from qlora_wgpu.config.overrides import located
from qlora_wgpu.config.paths import BUILT_IN_CHAT_TEMPLATES, is_inline_template
from qlora_wgpu.errors import ConfigError, brief
from qlora_wgpu.presence import exists

TRUSTED = "QLORA_WGPU_TRUSTED_CONFIGS"
"""The environment's name of files that may name other machines, apart as in PATH."""

AnyConfig = Config | str | PathLike[str] | Mapping[str, Any]


def as_config(config: AnyConfig, overrides: Overrides = ()) -> Config:
    """Reads and checks a configuration.

    Args:
        config: A ``Config``, the path of a YAML file or of a run's folder, or a mapping with its
            sections.
        overrides: Values by key, dotted key or section; or, for a YAML file, texts such as
            ``"train.max_steps=10"``.

    Raises:
        ConfigError: If anything in it is wrong.
    """
    if isinstance(config, str | PathLike):
        folder = Path(config).expanduser()
        if is_run(folder):
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

    Args:
        config: Where the settings come from.
        settings: What was read there, overrides included.
        overrides: As ``as_config`` takes them.

    Raises:
        ConfigError: If only the file names it, or only the file allows plain TCP.
    """
    scheduler = settings.cluster.scheduler
    if not isinstance(config, str | PathLike) or scheduler in (None, "local"):
        return
    address = Address.parse(str(scheduler))
    listed = os.environ.get(TRUSTED, "").split(os.pathsep)
    trusted = {Path(name).expanduser().resolve() for name in listed if name}
    file = Path(config).expanduser().resolve()
    if address.is_loopback or not trusted.isdisjoint((file, file / "config.yaml")):
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
    settings = load_config(run / "config.yaml", overrides)
    changes: dict[str, dict[str, Any]] = {}
    if ("output", "dir") not in _overridden(overrides):
        changes["output"] = {"dir": str(run)}
    kept = run / "adapter" / TEMPLATE
    if is_lost_template(settings.data.chat_template) and exists(kept):
        changes["data"] = {"chat_template": str(kept)}
    return changed(settings, changes)


def is_lost_template(template: str | None) -> bool:
    """Whether a chat template is a file that is not there any more."""
    if template is None or template in BUILT_IN_CHAT_TEMPLATES or is_inline_template(template):
        return False
    return not exists(Path(template))
