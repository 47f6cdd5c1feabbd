"""What a shell completes: paths, wherever a command may be given one."""

from __future__ import annotations

import click

_OPTIONS = frozenset(
    ("--adapter", "--chat-template", "--config", "--data", "--eval", "--gguf", "--model", "--out")
)
_PATH = click.Path(readable=False)  # whether it can be read is told by who reads it


def complete_paths(command: click.Command) -> None:
    """Lets a shell complete paths for options that name a file, and for all first arguments.

    A hub name fits in their place as well: nothing is looked up.
    """
    for parameter in command.params:
        if parameter.type is click.STRING and _takes_path(parameter):
            parameter.type = _PATH


def _takes_path(parameter: click.Parameter) -> bool:
    if isinstance(parameter, click.Argument):
        return parameter.nargs == 1
    return not _OPTIONS.isdisjoint(parameter.opts)
