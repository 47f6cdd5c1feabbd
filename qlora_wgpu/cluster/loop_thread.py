"""An asyncio loop in a thread of its own, asked from outside."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import Any, TypeVar

_T = TypeVar("_T")
_PERIOD = 0.1  # seconds between two looks at what else there is


class LoopThread:
    """Runs coroutines while the caller waits, looks after other things, or is interrupted."""

    def __init__(self) -> None:
        """Starts the thread."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="cluster", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Begins a coroutine."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(
        self, work: Coroutine[Any, Any, _T], meanwhile: Callable[[], None] = lambda: None
    ) -> _T:
        """Runs a coroutine to its end; one that is interrupted is cancelled.

        Args:
            work: The coroutine.
            meanwhile: Called again and again in the caller's thread; what it raises ends the wait.
        """
        future = self.submit(work)
        try:
            while True:
                with contextlib.suppress(NotYet):
                    return future.result(_PERIOD)
                if future.done():  # its own error was a TimeoutError, too
                    return future.result()
                meanwhile()
        finally:
            future.cancel()

    def stop(self, seconds: float) -> None:
        """Ends the thread, whatever still runs in it."""
        with contextlib.suppress(Exception):
            self.submit(_cancelled()).result(seconds)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(seconds)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancelled() -> None:
    """Ends all that runs on this loop."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.wait(others, timeout=1.0) if others else None
