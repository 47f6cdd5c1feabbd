"""What a download from the hub shows while it takes long, and how Ctrl-C ends it."""

from __future__ import annotations

import io
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_DELAY = 1.0  # seconds: what is in the local cache already is looked through in less
_BETWEEN_LINES = 15.0  # seconds


@contextmanager
def waiting_bars(name: str) -> Iterator[type[Any]]:
    """A class of bars for the hub's client, with which it downloads ``name``.

    They show nothing for a second and leave nothing. Where no bar can be drawn, in a file or beside
    another one, there is a line now and then.

    After Ctrl-C the client waits for all files that its threads have begun, which may take an hour:
    here each of them ends at its next piece.
    """
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    bars: list[Any] = []
    stopped = threading.Event()
    draws = sys.stderr.isatty() and not hasattr(sys.stderr, "rich_proxied_file")
    lines = {} if draws else {"file": io.StringIO(), "disable": False}

    class WaitingBar(tqdm):
        told_at = 0.0  # of all bars of a download

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(  # type: ignore[no-untyped-call]
                *args, **{**options, **lines, "delay": _DELAY, "leave": False}
            )
            bars.append(self)

        def display(self, *args: Any, **options: Any) -> None:
            # What refreshes a bar does not look at its delay.
            if (now := self._time()) < self.start_t + self.delay:
                return
            if draws:
                super().display(*args, **options)
            elif now >= WaitingBar.told_at + _BETWEEN_LINES and self.total and not self.disable:
                WaitingBar.told_at = now
                sys.stderr.write(f"downloading {name}: {self._amounts()}\n")

        def _amounts(self) -> str:
            if self.unit != "B":
                return f"{self.n} of {self.total} files"
            return " of ".join(f"{self.format_sizeof(n)}B" for n in (self.n, self.total))

        def update(self, *args: Any) -> Any:
            if stopped.is_set():
                raise KeyboardInterrupt
            return super().update(*args)

    try:
        with _told_of_interrupts(stopped):
            yield WaitingBar
    finally:
        for bar in reversed(bars):  # the client leaves some open
            bar.close()


@contextmanager
def _told_of_interrupts(event: threading.Event) -> Iterator[None]:
    """Sets an event at Ctrl-C, and does what is done at it anyway."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return

    def handler(number: int, frame: FrameType | None) -> None:
        event.set()
        before(number, frame)

    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
