"""A run's YAML on the command line; what is written under an old name is told on stderr."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from qlora_wgpu.cli._terminal import Terminal
from qlora_wgpu.config import Config, load_config
from qlora_wgpu.config.renamed import RenamedKeyWarning


def read_settings(path: str, overrides: Sequence[str]) -> Config:
    """Reads a configuration.

    Raises:
        ConfigError: If anything in it is wrong.
    """
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always", RenamedKeyWarning)
        settings = load_config(path, overrides)
    console = Terminal(stderr=True, soft_wrap=True)
    for note in notes:
        console.print(f"note: {note.message}", style="yellow", highlight=False, markup=False)
    return settings
