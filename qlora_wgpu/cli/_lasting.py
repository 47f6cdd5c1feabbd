"""Output that may fail without ending what it tells of."""

from __future__ import annotations

import sys
from typing import Any, TextIO

from qlora_wgpu.supervision.streams import put_nowhere
from qlora_wgpu.visible import visible


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
