"""The console of all commands, which escapes control characters in foreign text."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import IO, Any, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.status import Status
from rich.table import Table
from rich.text import Text

from qlora_wgpu.supervision.streams import Output
from qlora_wgpu.visible import visible, visible_json, without_secrets

_UNLIMITED = 100_000  # columns of a pipe or a file, so that lines are not wrapped
_DEFAULT_WIDTH = 80  # of a terminal that reports none


class Terminal(Console):
    """A console that prints square brackets and control characters as plain text.

    Without a terminal, lines are not wrapped. A broken pipe does not end the command; with
    ``ignore_errors``, neither does a full disk.
    """

    def __init__(
        self, *, stderr: bool = False, soft_wrap: bool = False, ignore_errors: bool = False
    ) -> None:
        output, stream = None, sys.stderr if stderr else sys.stdout
        if stream is not None:  # None in programs without output
            guarded = Output(stream, ignore_broken_pipe=True, ignore_errors=ignore_errors or stderr)
            output = cast(IO[str], guarded)
        # A notebook gets plain lines: live display would need ipywidgets.
        super().__init__(
            stderr=stderr, soft_wrap=soft_wrap, markup=False, emoji=False, highlight=False,
            force_jupyter=False, force_terminal=False if in_notebook() else None, file=output
        )  # fmt: skip
        columns = os.environ.get("COLUMNS", "")
        is_set = columns.isdigit() and int(columns) > 0  # with 0 nothing would be shown
        if not (self.is_terminal or is_set):
            self.width = _UNLIMITED
        elif self.width < 1:
            self.width = _DEFAULT_WIDTH

    def render_str(self, text: str, **options: Any) -> Text:
        """Styles a text, without markup."""
        return super().render_str(visible(without_secrets(text)), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Escapes all segments except rich's own, which move the cursor."""
        for piece in super().render(renderable, options):
            yield piece if piece.control else Segment(visible(piece.text), piece.style)

    def note(self, text: object) -> None:
        """Prints a note."""
        self.print(f"note: {text}", style="yellow")

    def warning(self, text: object) -> None:
        """Prints a warning."""
        self.print(f"warning: {text}", style="yellow")

    def facts(self, rows: Mapping[str, str]) -> None:
        """Prints names and texts in two columns."""
        if self.is_terminal or self.is_jupyter:
            table = Table(show_header=False, box=None)
            table.add_column()
            table.add_column(overflow="fold")  # so that no path is truncated
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
        """Whether the encoding can write a text; pipes on Windows often cannot."""
        try:
            text.encode(self.encoding)
        except (UnicodeEncodeError, LookupError):
            return False
        return True


class _PlainStatus(Status):
    def update(self, status: RenderableType | None = None, **options: Any) -> None:
        """Replaces the text."""
        super().update(None if status is None else _plain(status), **options)


def _plain(shown: RenderableType) -> RenderableType:
    return Text(visible(without_secrets(shown))) if isinstance(shown, str) else shown


def in_notebook() -> bool:
    """Whether a notebook shows what is printed; its kernel claims to be a terminal."""
    ipython = sys.modules.get("IPython")
    return hasattr(ipython.get_ipython(), "kernel") if ipython is not None else False


def write(text: str) -> None:
    """Writes text to stdout, unbuffered."""
    sys.stdout.write(visible(text))
    sys.stdout.flush()


def write_json(value: Any, *, ignore_errors: bool = False) -> None:
    """Writes a value to stdout as a line of JSON, in UTF-8 whatever the console's encoding is.

    With ``ignore_errors``, neither a broken pipe nor a full disk ends the command.
    """
    reconfigure = getattr(sys.stdout, "reconfigure", None)  # only files have it
    if reconfigure is not None:  # otherwise some characters are escaped, which is not JSON
        reconfigure(encoding="utf-8", errors="backslashreplace")
    stream: TextIO | Output = sys.stdout
    if ignore_errors:
        stream = Output(sys.stdout, ignore_broken_pipe=True, ignore_errors=True)
    stream.write(visible_json(value) + "\n")
    stream.flush()
