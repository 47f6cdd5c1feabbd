"""A configuration in whichever form it was given."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from qlora_wgpu.checkpoint.tokenizer_files import TEMPLATE
from qlora_wgpu.config import Config, load_config
from qlora_wgpu.config.as_trained import changed
from qlora_wgpu.config.loading import Overrides, with_settings
from qlora_wgpu.config.paths import BUILT_IN_CHAT_TEMPLATES, is_inline_template
from qlora_wgpu.errors import ConfigError, brief
from qlora_wgpu.presence import exists, is_file

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
        if is_file(folder / "config.yaml"):
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


def _of_run(run: Path, overrides: Overrides) -> Config:
    """The settings of a run, wherever its folder is now, with the chat template that it keeps."""
    settings = load_config(run / "config.yaml", overrides)
    changes: dict[str, dict[str, Any]] = {"output": {"dir": str(run)}}
    kept = run / "adapter" / TEMPLATE
    if _is_lost(settings.data.chat_template) and exists(kept):
        changes["data"] = {"chat_template": str(kept)}
    return changed(settings, changes)


def _is_lost(template: str | None) -> bool:
    """Whether a chat template is a file that is not there any more."""
    if template is None or template in BUILT_IN_CHAT_TEMPLATES or is_inline_template(template):
        return False
    return not exists(Path(template))
