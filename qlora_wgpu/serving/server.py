"""The server's end on Ctrl-C."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

_CLOSED = 0.3  # seconds in which it takes no more requests, come what may
_LOOK = 0.1  # seconds between two looks at whether there was another Ctrl-C


class StoppableServer(uvicorn.Server):
    """Ends answers that are being written, for whose end it would wait else."""

    def __init__(self, config: uvicorn.Config, stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._stop = stop

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Takes no more requests, and waits for the ends of answers, until a second Ctrl-C."""
        self._stop()
        ending = asyncio.ensure_future(super().shutdown(sockets))
        # Since Python 3.12 it would wait for clients that stay connected, too, whatever comes.
        await asyncio.wait({ending}, timeout=_CLOSED)
        while not (ending.done() or self.force_exit):
            await asyncio.wait({ending}, timeout=_LOOK)
        if not ending.done():
            ending.cancel()
            await asyncio.wait({ending})
        elif not ending.cancelled():
            ending.result()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Takes a signal; a second Ctrl-C waits for nobody, and requests cut off are no errors."""
        super().handle_exit(sig, frame)
        if self.force_exit:
            logging.getLogger("uvicorn.error").disabled = True
