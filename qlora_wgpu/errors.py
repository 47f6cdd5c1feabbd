"""The exceptions of this package, and what their messages are made of.

Every failure that a user can cause or meet raises one. Each message is one sentence that says what
is wrong, where, and what to do. The command line prints it without a traceback and exits with
``exit_code``.
"""

from __future__ import annotations

import os
import re
import reprlib
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any

ERROR = 2  # exit code of every failure that a sentence explains
LOST = 75  # exit code of a process whose device was lost

# ---- exceptions ----------------------------------------------------------------------------------


class QLoRAError(Exception):
    """Base of all errors this package raises on purpose."""

    exit_code = ERROR


class QLoRAWarning(UserWarning):
    """A warning of a run that has no observer."""


class ConfigError(QLoRAError):
    """A configuration file, an override or an argument is wrong."""


class DataError(QLoRAError):
    """A data set cannot be read, or has no tokens to train on."""


class RewardError(DataError):
    """A reward function of a run failed; the run is saved."""


class TokenizerError(QLoRAError):
    """A tokenizer or chat template is missing or broken."""


class CheckpointError(QLoRAError):
    """A model folder, weight file or adapter is missing, damaged or does not fit."""


class WeightFileError(CheckpointError):
    """A file that a run reads weights from has changed since it was opened."""


class UnsupportedModelError(CheckpointError):
    """A model uses something that this package does not support."""


class DeviceError(QLoRAError):
    """No usable GPU, or the device does not support an operation."""


class OutOfMemoryError(DeviceError):
    """The device has too little memory, or a tensor or a loop exceeds one of its limits."""


class DeviceLostError(DeviceError):
    """The GPU was lost; another process may be able to open it again."""

    exit_code = LOST


class ShapeError(QLoRAError):
    """Shapes of an operation or of its inputs do not fit together."""


class TrainingError(QLoRAError):
    """Training cannot continue, for instance because the loss is not finite."""


class CallbackError(TrainingError):
    """A callback or observer of a run failed; its exception is the cause."""


class ClusterError(QLoRAError):
    """Workers, their scheduler, or the connection to them failed."""


# ---- parts of messages ---------------------------------------------------------------------------

_BRIEF = reprlib.Repr()
_BRIEF.maxlevel = 2
_BRIEF.maxstring = _BRIEF.maxother = 120
_BRIEF.maxlong = 40
_BRIEF.maxlist = _BRIEF.maxtuple = _BRIEF.maxdict = 6

_command: ContextVar[str] = ContextVar("command", default="")


@contextmanager
def on_command_line(typed: str) -> Iterator[None]:
    """Within it, messages name options as the command line does; ``typed`` is the whole command."""
    token = _command.set(typed)
    try:
        yield
    finally:
        _command.reset(token)


def command() -> str:
    """The command that is running; empty in a Python program."""
    return _command.get()


def option(name: str, value: object = True) -> str:
    """An option in a message: ``--resume`` on the command line, ``resume=True`` in Python.

    ``name`` is the parameter in Python, and ``value`` its value there, or ``...`` for any.
    """
    if command():
        return f"--{name.replace('_', '-')}"
    return f"{name}={'...' if value is ... else value}"


def brief(value: Any) -> str:
    """A value from a user's file in a message: its ``repr`` with bounded length and depth."""
    return _BRIEF.repr(value)


def reason(err: Exception) -> str:
    """An error's message, without the number and path that the system adds."""
    return getattr(err, "strerror", None) or str(err)


# ---- commands in messages ------------------------------------------------------------------------

_PLAIN = re.compile(r"[\w./\\:=+~-]+")  # in cmd.exe and PowerShell
_BEFORE_A_QUOTE = re.compile(r'(\\*)("|$)')  # where backslashes are special


def shell_word(word: str, *, windows: bool = os.name == "nt") -> str:
    """A word, quoted if necessary; cmd.exe only knows double quotes."""
    if not windows:
        return shlex.quote(word)
    if _PLAIN.fullmatch(word):
        return word
    escaped = _BEFORE_A_QUOTE.sub(lambda m: m[1] * 2 + (r"\"" if m[2] else ""), word)
    return f'"{escaped}"'


def shell_command(words: Iterable[str], *, windows: bool = os.name == "nt") -> str:
    """A command, its words quoted if necessary."""
    return " ".join(shell_word(word, windows=windows) for word in words)


# ---- missing packages ----------------------------------------------------------------------------

# Messages name the packages, never the project with an extra: until the project is published,
# anybody could register its name on an index.
EXTRAS = {
    "parquet": ("pyarrow>=15",),
    "images": ("pillow>=10.1",),
    "tensorboard": ("tensorboard>=2.15",),
    "wandb": ("wandb>=0.17",),
    "trackio": ("trackio>=0.43",),
    "cluster": ("distributed>=2024.8", "cryptography>=42"),
    "serve": ("starlette>=0.40", "uvicorn>=0.30"),
    "jsonschema": ("jsonschema>=4.18",),
    "math": ("math-verify>=0.8",),
    "dawn": ("wgpudawn>=0.32.0.4,<0.33",),
}
_NEEDED_BY = {
    "cluster": "clusters",
    "serve": "serve",
    "jsonschema": "the reward json_schema",
    "math": "the reward math_verify",
}


def install_command(extra: str) -> str:
    """The command that installs an extra's packages, quoted for any shell."""
    return " ".join(("pip install", *(f'"{each}"' for each in EXTRAS[extra])))


def require_extra(extra: str) -> None:
    """Raises a ConfigError with the command that installs an extra's missing packages."""
    names = [requirement.partition(">")[0] for requirement in EXTRAS[extra]]
    missing = [name for name in names if find_spec(name.replace("-", "_")) is None]
    if missing:
        needed = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} required"
        raise ConfigError(f"{needed} for {_NEEDED_BY[extra]}: {install_command(extra)}")
