"""The optional packages of pyproject.toml's extras, and how to install them.

Messages name the packages, never the project with an extra: until the project is published, anybody
could register its name on an index.
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
_NEEDED_BY = {"cluster": "clusters", "serve": "serve"}


def install_command(extra: str) -> str:
    """The command that installs an extra's packages, quoted for any shell."""
    return " ".join(("pip install", *(f'"{each}"' for each in EXTRAS[extra])))


def require_extra(extra: str) -> None:
    """Raises a ConfigError with the command that installs an extra's missing packages."""
    names = [requirement.partition(">")[0] for requirement in EXTRAS[extra]]
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        needed = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} required"
        raise ConfigError(f"{needed} for {_NEEDED_BY[extra]}: {install_command(extra)}")
