"""The server's end on Ctrl-C."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn


class StoppableServer(uvicorn.Server):
    """Ends answers that are being written, for whose end it would wait else."""

    def __init__(self, config: uvicorn.Config, stop: Callable[[], None]) -> None:
        """Runs nothing yet.

        Args:
            config: What is served, and how.
            stop: Ends the answers.
        """
        super().__init__(config)
        self._stop = stop

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Takes no more requests, and waits for the ends of answers."""
        self._stop()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Takes a signal; a second Ctrl-C waits for nobody, and requests cut off are no errors."""
        super().handle_exit(sig, frame)
        if self.force_exit:
            logging.getLogger("uvicorn.error").disabled = True
