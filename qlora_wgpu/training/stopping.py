"""Ctrl-C, SIGTERM and a closed terminal as a wish, granted between two micro-batches."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from qlora_wgpu.supervision.processes import SAME_WISH

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has not all of them
_SIGNALS = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]


class StopRequest:
    """While it is entered, the first signal is noted; the second does what it always does.

    Those that come together are one.

    Attributes:
        requested: Whether somebody asked.
        number: The signal that did; None where it was none.
    """

    def __init__(self) -> None:
        """Nothing is asked for yet."""
        self.requested = False
        self.number: int | None = None
        self._since = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        """Takes over the signals, where Python lets it: in the main thread.

        Those that are ignored stay so, as with nohup.
        """
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is signal.SIG_IGN:
                    continue
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Gives the signals back."""
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.requested, self.number, self._since = True, number, time.monotonic()
        elif time.monotonic() - self._since > SAME_WISH:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
