"""The exception tree: every failure a user can cause or meet is one of these.

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
LOST = 75  # the device was lost, and the process could still say so

_BRIEF = reprlib.Repr()
_BRIEF.maxlevel = 2
_BRIEF.maxstring = _BRIEF.maxother = 120
_BRIEF.maxlong = 40
_BRIEF.maxlist = _BRIEF.maxtuple = _BRIEF.maxdict = 6


class QLoRAError(Exception):
    """Base of all errors this package raises on purpose."""

    exit_code = ERROR


class QLoRAWarning(UserWarning):
    """What a run would tell an observer, where it has none."""


class ConfigError(QLoRAError):
    """A configuration file, an override or an argument is wrong."""


class DataError(QLoRAError):
    """A data set cannot be read or has nothing to learn from."""


class TokenizerError(QLoRAError):
    """A tokenizer or chat template is missing or broken."""


class CheckpointError(QLoRAError):
    """A model folder, weight file or adapter is missing, damaged or does not fit."""


class WeightFileError(CheckpointError):
    """A file that a run reads weights from has changed since it was opened."""


class UnsupportedModelError(CheckpointError):
    """A model asks for something this package does not compute."""


class DeviceError(QLoRAError):
    """No usable GPU, or the device cannot do what is asked of it."""


class OutOfMemoryError(DeviceError):
    """The device has not enough memory, or a tensor or a loop exceeds one of its limits."""


class DeviceLostError(DeviceError):
    """The GPU stopped working in the middle; a process of its own may open it again."""

    exit_code = LOST


class ShapeError(QLoRAError):
    """Shapes of an operation or of its inputs do not fit together."""


class TrainingError(QLoRAError):
    """Training cannot go on, for instance because the loss is no longer finite."""


class CallbackError(TrainingError):
    """A function that a run was given has failed; its own error is the cause."""


class ClusterError(QLoRAError):
    """Workers, their scheduler, or the way to them fail."""


_command: ContextVar[str] = ContextVar("command", default="")


@contextmanager
def on_command_line(typed: str) -> Iterator[None]:
    """While it is entered, messages name options as the command line does.

    Args:
        typed: The whole command.
    """
    token = _command.set(typed)
    try:
        yield
    finally:
        _command.reset(token)


def command() -> str:
    """The command that is being run; empty in a Python program."""
    return _command.get()


def option(name: str, value: object = True) -> str:
    """An option for a message, as its reader gives it: ``--resume``, or ``resume=True`` in Python.

    Args:
        name: As Python has it.
        value: What Python gives it; ``...`` where that is the reader's.
    """
    if command():
        return f"--{name.replace('_', '-')}"
    return f"{name}={'...' if value is ... else value}"


def brief(value: Any) -> str:
    """A value of a foreign file for a message: its ``repr``, of bounded length and depth."""
    return _BRIEF.repr(value)


def reason(err: Exception) -> str:
    """Why something failed, in the system's words: without the number and name that it adds."""
    return getattr(err, "strerror", None) or str(err)
