"""A run's YAML or folder on the command line; a key under an old name is told on stderr."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from qlora_wgpu.cli._terminal import Terminal
from qlora_wgpu.config import Config
from qlora_wgpu.config.renamed import RenamedKeyWarning
from qlora_wgpu.runs.settings import as_config


def read_settings(path: str, overrides: Sequence[str]) -> Config:
    """Reads a configuration: a YAML file, or the one that a run's folder keeps.

    Raises:
        ConfigError: If anything in it is wrong.
    """
    with renamed_keys_told():
        return as_config(path, overrides)


@contextmanager
def renamed_keys_told() -> Iterator[None]:
    """While it is entered, a key that is read under an old name is told on stderr."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", RenamedKeyWarning)
        show = warnings.showwarning

        def tell(message: Any, category: type[Warning], *where: Any, **options: Any) -> None:
            if not issubclass(category, RenamedKeyWarning):
                show(message, category, *where, **options)
                return
            console = Terminal(stderr=True, soft_wrap=True)
            console.print(f"note: {message}", style="yellow", highlight=False, markup=False)

        warnings.showwarning = tell
        yield
