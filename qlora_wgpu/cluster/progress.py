"""What the parts of an engine wait for together: that something happens, or fails to."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from typing import Any

_TICK = 0.2  # seconds after which it is asked again who is late


class Progress:
    """Changes, when the last good one was, and what ends everything. Lives on one asyncio loop."""

    def __init__(self) -> None:
        """Nothing has happened yet."""
        self._changed = asyncio.Event()
        self._advanced = time.monotonic()
        self._failure: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Begins something that goes on by itself."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Ends all that goes on by itself: from now on nothing is told."""
        while self._tasks:
            for task in self._tasks:
                task.cancel()  # again, where Dask has lost one
            await asyncio.wait(self._tasks, timeout=_TICK)

    def notify(self) -> None:
        """Something has changed: who waits looks again."""
        self._changed.set()

    def advance(self) -> None:
        """Something has got on, so that patience begins anew."""
        self._advanced = time.monotonic()

    def fail(self, error: BaseException) -> None:
        """Whoever waits gets this error."""
        self._failure = error

    @property
    def waited(self) -> float:
        """Seconds since something got on."""
        return time.monotonic() - self._advanced

    async def change(self) -> None:
        """Waits until something changes, or for a moment.

        Raises:
            BaseException: What ``fail`` was given.
        """
        with contextlib.suppress(TimeoutError):  # wait_for may lose a cancellation
            async with asyncio.timeout(_TICK):
                await self._changed.wait()
        self._changed.clear()
        if self._failure is not None:
            raise self._failure
