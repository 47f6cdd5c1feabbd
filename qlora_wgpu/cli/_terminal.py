"""The door to the terminal: what others wrote is shown there, never obeyed."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.status import Status
from rich.text import Text

from qlora_wgpu.errors import on_command_line
from qlora_wgpu.visible import visible, visible_json, without_secrets


class Terminal(Console):
    """A console on which square brackets and control characters of others are plain text."""

    def __init__(self, *, stderr: bool = False, soft_wrap: bool = False) -> None:
        """Writes to stdout or stderr.

        Args:
            stderr: Whether to stderr.
            soft_wrap: Whether long lines are left to the terminal.
        """
        # In a notebook, plain lines: what moves would need ipywidgets there.
        super().__init__(
            stderr=stderr, soft_wrap=soft_wrap, markup=False, emoji=False, force_jupyter=False,
            force_terminal=False if _in_notebook() else None,
        )  # fmt: skip

    def render_str(self, text: str, **options: Any) -> Text:
        """Styles a text, which is shown as it is."""
        return super().render_str(visible(without_secrets(text)), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Cuts what is printed into pieces; those that move the cursor are rich's own."""
        for piece in super().render(renderable, options):
            yield piece if piece.control else Segment(visible(piece.text), piece.style)

    def status(self, status: RenderableType, **options: Any) -> Status:
        """A line with a spinner."""
        return _PlainStatus(_plain(status), console=self, **options)


def _in_notebook() -> bool:
    """Whether a notebook's kernel shows what is printed, which calls itself a terminal."""
    ipython = sys.modules.get("IPython")
    return hasattr(ipython.get_ipython(), "kernel") if ipython is not None else False


class _PlainStatus(Status):
    def update(self, status: RenderableType | None = None, **options: Any) -> None:
        """Shows something else."""
        super().update(None if status is None else _plain(status), **options)


def _plain(shown: RenderableType) -> RenderableType:
    return Text(visible(without_secrets(shown))) if isinstance(shown, str) else shown


def write(text: str) -> None:
    """Writes a part of a text to stdout at once."""
    sys.stdout.write(visible(text))
    sys.stdout.flush()


def write_json(value: Any) -> None:
    """Writes a value to stdout as a line of JSON."""
    sys.stdout.write(visible_json(value) + "\n")


def write_what_can_be_written() -> None:
    """Lets stdout and stderr escape characters that the terminal's encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)  # others than files have none
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


_TYPED = f"{__name__}.typed"


class Commands(click.Group):
    """A group whose messages about arguments show what these hold."""

    def make_context(
        self, info_name: str | None, args: list[str], *others: Any, **options: Any
    ) -> click.Context:
        """Reads the group's own arguments."""
        with _visible_messages():
            typed = shlex.join(["qlora-wgpu", *args])
            context = super().make_context(info_name, args, *others, **options)
            context.meta[_TYPED] = typed
            return context

    def invoke(self, ctx: click.Context) -> Any:
        """Reads a command's arguments and runs it."""
        with _visible_messages(), on_command_line(ctx.meta[_TYPED]):
            return super().invoke(ctx)


@contextmanager
def _visible_messages() -> Iterator[None]:
    try:
        yield
    except click.ClickException as err:
        vars(err).update(message=visible(err.message))
        raise
