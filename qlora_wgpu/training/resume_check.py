"""Whether a run in a folder may go on with a configuration."""

from __future__ import annotations

import warnings
from pathlib import Path

from qlora_wgpu.config import Config, load_config
from qlora_wgpu.config.renamed import RenamedKeyWarning
from qlora_wgpu.errors import ConfigError, option
from qlora_wgpu.presence import exists
from qlora_wgpu.training.run_folder import checkpoint_folders
from qlora_wgpu.training.run_identity import refuse_other_settings


def check_resumable(path: Path, config: Config) -> bool:
    """Whether a folder holds a run to go on with; False if one may begin there.

    Raises:
        ConfigError: If it holds another run, or one that has nothing to go on from and would be
            lost.
    """
    has_checkpoint, has_adapter = bool(checkpoint_folders(path)), exists(path / "adapter")
    if exists(path / "config.yaml"):
        check_same_run(path, config)
    elif has_checkpoint or has_adapter:
        raise ConfigError(
            f"{path} holds a run without its config.yaml, so nothing says whether it is the same "
            f"run: put the file back, or train with {option('overwrite')} to begin anew"
        )
    if has_adapter and not has_checkpoint:
        raise ConfigError(
            f"the run in {path} has an adapter, but no checkpoint to go on from: use it as it is, "
            f"or train with {option('overwrite')} to begin anew"
        )
    return has_checkpoint


def check_same_run(path: Path, config: Config) -> None:
    """Makes sure that a run is not continued as another one.

    Raises:
        ConfigError: If a setting differs that decides what is computed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RenamedKeyWarning)  # the file is ours, not the user's
        before = load_config(path / "config.yaml")
    refuse_other_settings(before.fixed_settings(), config.fixed_settings(), str(path))
