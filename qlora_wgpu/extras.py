"""The extras of pyproject.toml: packages that an installation may lack, and how they are installed.

A message names the packages, never the project with an extra: until the project is published, its
name on an index could be anybody's.
"""

from __future__ import annotations

from importlib.util import find_spec

from qlora_wgpu.errors import ConfigError

EXTRAS = {
    "parquet": ("pyarrow>=15",),
    "tensorboard": ("tensorboard>=2.15",),
    "wandb": ("wandb>=0.17",),
    "trackio": ("trackio>=0.43",),
    "cluster": ("distributed>=2024.8", "cryptography>=42"),
    "serve": ("starlette>=0.40", "uvicorn>=0.30"),
    "dawn": ("wgpudawn>=0.32.0.4,<0.33",),
}
_WHO_NEEDS = {"cluster": "several GPUs and machines need", "serve": "serve needs"}


def install_command(extra: str) -> str:
    """The command that installs an extra's packages, quoted as every shell takes it."""
    return " ".join(("pip install", *(f'"{each}"' for each in EXTRAS[extra])))


def require_extra(extra: str) -> None:
    """Raises a ConfigError that says how to install what is missing of an extra."""
    names = [requirement.partition(">")[0] for requirement in EXTRAS[extra]]
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        needed = f"{_WHO_NEEDS[extra]} {' and '.join(missing)}"
        raise ConfigError(f"{needed}: {install_command(extra)}")
