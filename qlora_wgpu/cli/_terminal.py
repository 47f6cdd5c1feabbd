"""The door to the terminal: what others wrote is shown there, never obeyed; it may break."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any, TextIO, cast

import click
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.status import Status
from rich.table import Table
from rich.text import Text

from qlora_wgpu.errors import QLoRAError, on_command_line, reason
from qlora_wgpu.shell_words import shell_command
from qlora_wgpu.supervision.streams import drop_closed, put_nowhere
from qlora_wgpu.visible import visible, visible_json, without_secrets

# ---- streams and consoles ------------------------------------------------------------------------


class LastingOutput:
    """A stream that is shown: once nobody reads it, nothing is written any more.

    What a command does, and how it ends, does not hang on who looks at it.
    """

    def __init__(self, stream: TextIO, *, for_hours: bool) -> None:
        """Wraps a stream.

        Args:
            stream: Stdout or stderr.
            for_hours: Whether a disk that is full ends nothing, either, and a warning tells that
                nothing more is shown: the folder of a run has it all.
        """
        self._stream: TextIO | None = stream
        self._like = stream
        self._for_hours = for_hours

    def __getattr__(self, name: str) -> Any:
        """Everything else is the stream's."""
        return getattr(self._like, name)

    def write(self, text: str) -> int:
        """Writes a text, or drops it.

        Raises:
            OSError: If it can be written no more, and not for a reason that is passed over.
        """
        if self._stream is not None:
            try:
                return self._stream.write(text)
            except OSError as err:
                self._end(err)
        return len(text)

    def flush(self) -> None:
        """Brings what is written to where it goes.

        Raises:
            OSError: As of ``write``.
        """
        if self._stream is not None:
            try:
                self._stream.flush()
            except OSError as err:
                self._end(err)

    def _end(self, err: OSError) -> None:
        on_stderr = self._like is sys.stderr  # nobody could be told of it
        if not (self._for_hours or on_stderr or isinstance(err, BrokenPipeError)):
            raise err
        self._stream = None
        if self._like in (sys.__stdout__, sys.stdout, sys.stderr):
            put_nowhere(self._like)
        if on_stderr or not self._for_hours:
            return
        why = visible(err.strerror or str(err))
        try:
            sys.stderr.write(f"warning: nothing more can be shown ({why}): the run goes on\n")
            sys.stderr.flush()
        except OSError:  # it goes the same way
            put_nowhere(sys.stderr)


_UNBROKEN = 100_000  # columns of a pipe or a file, whose lines nobody breaks
_USUAL = 80  # of a terminal that says it has none
_GIVEN = {  # how a command is given what it takes by an option, by that option's parameter
    "prompt": "A text is given with --prompt",
    "data_paths": "Model and data are given with --model and --data",
    "gguf_file": "The file to write is given with --gguf",
    "out": "The folder to write is given with --out",
}


class Terminal(Console):
    """A console on which square brackets and control characters of others are plain text.

    Where there is no terminal, lines are as long as they are. A pipe that nobody reads any more
    is no error: the command goes on to its own end.
    """

    def __init__(
        self, *, stderr: bool = False, soft_wrap: bool = False, lasting: bool = False
    ) -> None:
        """Writes to stdout or stderr.

        Args:
            stderr: Whether to stderr.
            soft_wrap: Whether long lines are left to the terminal.
            lasting: Whether it may also fail otherwise, such as a log on a disk that is full,
                without an error.
        """
        output, stream = None, sys.stderr if stderr else sys.stdout
        if stream is not None:  # None where a program has no output at all
            output = cast(IO[str], LastingOutput(stream, for_hours=lasting))
        # In a notebook, plain lines: what moves would need ipywidgets there.
        super().__init__(
            stderr=stderr, soft_wrap=soft_wrap, markup=False, emoji=False, force_jupyter=False,
            force_terminal=False if in_notebook() else None, file=output,
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

    def print(self, *objects: Any, **options: Any) -> None:
        """Prints a line.

        Raises:
            QLoRAError: If that is impossible.
        """
        with _explained():
            super().print(*objects, **options)

    def facts(self, rows: Mapping[str, str]) -> None:
        """Prints a name and a text on each line, the texts below each other."""
        if self.is_terminal or self.is_jupyter:
            table = Table(show_header=False, box=None)
            table.add_column()
            table.add_column(overflow="fold")  # a path is whole, however narrow it gets
            for name, text in rows.items():
                table.add_row(name, text)
            self.print(table, highlight=False)
            return
        width = max(map(len, rows), default=0)
        for name, text in rows.items():
            first, *others = text.splitlines() or [""]
            self.print(f" {name:{width}}  {first}".rstrip(), highlight=False)
            for line in others:
                self.print(f" {'':{width}}  {line}".rstrip(), highlight=False)

    def status(self, status: RenderableType, **options: Any) -> Status:
        """A line with a spinner."""
        return _PlainStatus(_plain(status), console=self, **options)


def has_characters(console: Console, text: str) -> bool:
    """Whether a console's encoding has all of a text's characters; pipes on Windows lack many."""
    try:
        text.encode(console.encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def in_notebook() -> bool:
    """Whether a notebook's kernel shows what is printed, which calls itself a terminal."""
    ipython = sys.modules.get("IPython")
    return hasattr(ipython.get_ipython(), "kernel") if ipython is not None else False


class _PlainStatus(Status):
    def update(self, status: RenderableType | None = None, **options: Any) -> None:
        """Shows something else."""
        super().update(None if status is None else _plain(status), **options)


def _plain(shown: RenderableType) -> RenderableType:
    return Text(visible(without_secrets(shown))) if isinstance(shown, str) else shown


# ---- output --------------------------------------------------------------------------------------


def write(text: str) -> None:
    """Writes a part of a text to stdout at once.

    Raises:
        QLoRAError: If that is impossible.
    """
    with _explained():
        sys.stdout.write(visible(text))
        sys.stdout.flush()


def write_json(value: Any, *, lasting: bool = False) -> None:
    """Writes a value to stdout as a line of JSON, in UTF-8 whatever the console has, at once.

    Args:
        value: What ``json.dumps`` takes.
        lasting: As of ``Terminal``.

    Raises:
        QLoRAError: If that is impossible.
    """
    reconfigure = getattr(sys.stdout, "reconfigure", None)  # others than files have none
    if reconfigure is not None:  # what a console lacks, it would escape as no JSON does
        reconfigure(encoding="utf-8", errors="backslashreplace")
    stream = LastingOutput(sys.stdout, for_hours=True) if lasting else sys.stdout
    with _explained():
        stream.write(visible_json(value) + "\n")
        stream.flush()


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # whoever read texts has seen enough, and no more are made
        drop_closed()
        sys.exit(0)
    except OSError as err:
        raise QLoRAError(
            f"what is shown cannot be written to the standard output: {reason(err)}"
        ) from err


def write_what_can_be_written() -> None:
    """Lets stdout and stderr escape characters that the terminal's encoding lacks.

    Stdin takes no others: locales of C would pass halves of characters on.
    """
    streams = {sys.stdout: "backslashreplace", sys.stderr: "backslashreplace", sys.stdin: "strict"}
    for stream, errors in streams.items():
        reconfigure = getattr(stream, "reconfigure", None)  # others than files have none
        if reconfigure is not None:
            reconfigure(errors=errors)


# ---- click's messages ----------------------------------------------------------------------------

_TYPED = f"{__name__}.typed"


class Commands(click.Group):
    """A group whose messages about arguments show what these hold."""

    def make_context(
        self, info_name: str | None, args: list[str], *others: Any, **options: Any
    ) -> click.Context:
        """Reads the group's own arguments."""
        with _visible_messages():
            typed = shell_command(["qlora-wgpu", *args])
            context = super().make_context(info_name, args, *others, **options)
            context.meta[_TYPED] = typed
            return context

    def invoke(self, ctx: click.Context) -> Any:
        """Reads a command's arguments and runs it."""
        with _visible_messages(), on_command_line(ctx.meta[_TYPED]):
            return super().invoke(ctx)


@contextmanager
def _visible_messages() -> Iterator[None]:
    """Makes click's messages visible, and Ctrl-C the exit code that shells know."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError as err:  # click would make exit code 1 of it, whatever pipe it was
        if drop_closed():
            sys.exit(0)
        raise QLoRAError(f"a connection was closed at its other end: {reason(err)}") from err
    except click.ClickException as err:
        vars(err).update(message=visible(err.message) + _as_a_setting(err) + _as_an_option(err))
        raise


def _as_an_option(err: click.ClickException) -> str:
    """How something is given that was taken for an argument too many."""
    if type(err) is not click.UsageError or err.ctx is None:
        return ""
    parameters = {parameter.name for parameter in err.ctx.command.params}
    return next((f". {hint}" for name, hint in _GIVEN.items() if name in parameters), "")


def _as_a_setting(err: click.ClickException) -> str:
    """How a setting is given that was taken for an option, to commands that take settings."""
    if not isinstance(err, click.NoSuchOption) or err.ctx is None:
        return ""
    if not any(parameter.name == "overrides" for parameter in err.ctx.command.params):
        return ""
    # Imported where somebody has mistyped: the schema takes its time, which --help would pay.
    from qlora_wgpu.config.names import key_for
    from qlora_wgpu.config.schema import sections

    name = err.option_name.lstrip("-").replace("-", "_")
    homes = [section for section, keys in sections().items() if name in keys]
    key = (homes[0], name) if homes else key_for(name)
    return "" if key is None else f" It is a setting: {'.'.join(key)}=VALUE"
