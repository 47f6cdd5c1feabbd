"""A configuration in whichever form it was given."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

from qlora_wgpu.config import Config, load_config
from qlora_wgpu.config.loading import Overrides, with_settings
from qlora_wgpu.errors import ConfigError

AnyConfig = Config | str | PathLike[str] | Mapping[str, Any]


def as_config(config: AnyConfig, overrides: Overrides = ()) -> Config:
    """Reads and checks a configuration.

    Args:
        config: A ``Config``, the path of a YAML file, or a mapping with its sections.
        overrides: Values by key, dotted key or section; or, for a YAML file, texts such as
            ``"train.max_steps=10"``.

    Raises:
        ConfigError: If anything in it is wrong.
    """
    if isinstance(config, str | PathLike):
        return load_config(config, overrides)
    if isinstance(overrides, Mapping) or not overrides:
        return with_settings(config, overrides if isinstance(overrides, Mapping) else {})
    raise ConfigError(
        f"overrides such as {overrides[0]!r} belong to a YAML file: change the "
        f"{type(config).__name__} itself"
    )
