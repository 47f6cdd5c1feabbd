"""The console of all commands: what others wrote is shown there, never obeyed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import IO, Any, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.status import Status
from rich.table import Table
from rich.text import Text

from qlora_wgpu.supervision.streams import Output
from qlora_wgpu.visible import visible, visible_json, without_secrets

_UNBROKEN = 100_000  # columns of a pipe or a file, whose lines nobody breaks
_USUAL = 80  # of a terminal that says it has none


class Terminal(Console):
    """A console on which square brackets and control characters of others are plain text.

    Where there is no terminal, lines are as long as they are. A pipe that nobody reads any more
    is no error: the command goes on to its own end; if ``lasting``, a full disk is none, either.
    """

    def __init__(
        self, *, stderr: bool = False, soft_wrap: bool = False, lasting: bool = False
    ) -> None:
        output, stream = None, sys.stderr if stderr else sys.stdout
        if stream is not None:  # None where a program has no output at all
            output = cast(IO[str], Output(stream, goes_on=True, lasting=lasting or stderr))
        # In a notebook, plain lines: what moves would need ipywidgets there.
        super().__init__(
            stderr=stderr, soft_wrap=soft_wrap, markup=False, emoji=False, highlight=False,
            force_jupyter=False, force_terminal=False if in_notebook() else None, file=output
        )  # fmt: skip
        columns = os.environ.get("COLUMNS", "")
        is_set = columns.isdigit() and int(columns) > 0  # in no columns nothing would be shown
        if not (self.is_terminal or is_set):
            self.width = _UNBROKEN
        elif self.width < 1:
            self.width = _USUAL

    def render_str(self, text: str, **options: Any) -> Text:
        """Styles a text, which is shown as it is."""
        return super().render_str(visible(without_secrets(text)), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Cuts what is printed into pieces; those that move the cursor are rich's own."""
        for piece in super().render(renderable, options):
            yield piece if piece.control else Segment(visible(piece.text), piece.style)

    def note(self, text: object) -> None:
        """Prints what a user may want to know."""
        self.print(f"note: {text}", style="yellow")

    def warning(self, text: object) -> None:
        """Prints what a user should look at."""
        self.print(f"warning: {text}", style="yellow")

    def facts(self, rows: Mapping[str, str]) -> None:
        """Prints a name and a text on each line, the texts below each other."""
        if self.is_terminal or self.is_jupyter:
            table = Table(show_header=False, box=None)
            table.add_column()
            table.add_column(overflow="fold")  # a path is whole, however narrow it gets
            for name, text in rows.items():
                table.add_row(name, text)
            self.print(table)
            return
        width = max(map(len, rows), default=0)
        for name, text in rows.items():
            first, *others = text.splitlines() or [""]
            self.print(f" {name:{width}}  {first}".rstrip())
            for line in others:
                self.print(f" {'':{width}}  {line}".rstrip())

    def status(self, status: RenderableType, **options: Any) -> Status:
        """A line with a spinner."""
        return _PlainStatus(_plain(status), console=self, **options)

    def has_characters(self, text: str) -> bool:
        """Whether the encoding has all of a text's; pipes on Windows lack many."""
        try:
            text.encode(self.encoding)
        except (UnicodeEncodeError, LookupError):
            return False
        return True


class _PlainStatus(Status):
    def update(self, status: RenderableType | None = None, **options: Any) -> None:
        """Shows something else."""
        super().update(None if status is None else _plain(status), **options)


def _plain(shown: RenderableType) -> RenderableType:
    return Text(visible(without_secrets(shown))) if isinstance(shown, str) else shown


def in_notebook() -> bool:
    """Whether a notebook's kernel shows what is printed, which calls itself a terminal."""
    ipython = sys.modules.get("IPython")
    return hasattr(ipython.get_ipython(), "kernel") if ipython is not None else False


def write(text: str) -> None:
    """Writes a part of a text to stdout at once."""
    sys.stdout.write(visible(text))
    sys.stdout.flush()


def write_json(value: Any, *, lasting: bool = False) -> None:
    """Writes a value to stdout as a line of JSON, in UTF-8 whatever the console has, at once.

    If ``lasting``, neither a closed pipe nor a full disk ends the command.
    """
    reconfigure = getattr(sys.stdout, "reconfigure", None)  # others than files have none
    if reconfigure is not None:  # what a console lacks, it would escape as no JSON does
        reconfigure(encoding="utf-8", errors="backslashreplace")
    stream = Output(sys.stdout, goes_on=True, lasting=True) if lasting else sys.stdout
    stream.write(visible_json(value) + "\n")
    stream.flush()
