"""The exceptions of this package, for every failure that a user can cause or meet.

Each message is one sentence that says what is wrong, where, and what to do. The command line
prints it without a traceback and exits with ``exit_code``.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

ERROR = 2  # exit code of every failure that a sentence explains
LOST = 75  # exit code of a process whose device was lost

_BRIEF = reprlib.Repr()
_BRIEF.maxlevel = 2
_BRIEF.maxstring = _BRIEF.maxother = 120
_BRIEF.maxlong = 40
_BRIEF.maxlist = _BRIEF.maxtuple = _BRIEF.maxdict = 6


class QLoRAError(Exception):
    """Base of all errors this package raises on purpose."""

    exit_code = ERROR


class QLoRAWarning(UserWarning):
    """A warning of a run that has no observer."""


class ConfigError(QLoRAError):
    """A configuration file, an override or an argument is wrong."""


class DataError(QLoRAError):
    """A data set cannot be read, or has no tokens to train on."""


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
