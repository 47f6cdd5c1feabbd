"""A worker process of a cluster, and calls to the one actor that lives in it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from qlora_wgpu.cluster.actor import unpacked
from qlora_wgpu.cluster.blocks import Identity


class Gone(Exception):
    """A worker is not there any more."""


class ProcessLost(Gone):
    """Dask has noticed first that the worker's process is gone."""


@dataclass(eq=False)
class Member:
    """A worker process that there is.

    Attributes:
        name: The worker's.
        address: Where it listens.
        key: What tells it from another process at the same address.
        actor: Dask's proxy of the ``Actor`` there, once it is made.
        identity: What it is, once it has opened the model and nothing is wrong with it.
        version: Of the parameters that it has.
        writing: Held while parameters are on their way to it.
        gone: Is set when it is not there any more.
        is_reached: Whether it could be connected to when that was tried last.
        is_out: Whether it was refused, or left out for what it did.
        is_probed: Whether it is being asked if it answers again.
    """

    name: str
    address: str
    key: Any
    actor: Any = None
    identity: Identity | None = None
    version: int = -1
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    is_reached: bool = True
    is_out: bool = False
    is_probed: bool = False

    @property
    def is_ready(self) -> bool:
        """Whether it may compute."""
        return self.identity is not None and not self.is_out

    @property
    def is_opening(self) -> bool:
        """Whether it opens the model, as far as is known."""
        return self.identity is None and self.is_reached and not self.is_out

    async def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the ``RemoteWorker``.

        Raises:
            Gone: If the worker goes meanwhile.
            OSError: If it cannot be reached.
            WrongAnswerError: If its answer cannot be read.
            Exception: What the method raises.
        """
        if self.actor is None or self.gone.is_set():
            raise Gone
        try:
            return unpacked(await self.unless_gone(self.actor.answer(method, *arguments)))
        except RuntimeError as err:
            if "Actor" not in str(err):
                raise
            raise ProcessLost from None

    async def unless_gone(self, answer: Any) -> Any:
        """Waits for an answer, or for the worker to be gone.

        Raises:
            Gone: If it is gone first.
        """
        asked = asyncio.ensure_future(_awaited(answer))
        waiting = asyncio.ensure_future(self.gone.wait())
        try:
            await asyncio.wait({asked, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return asked.result()
            raise Gone
        finally:
            waiting.cancel()
            if not asked.done():
                asked.cancel()


async def _awaited(answer: Any) -> Any:
    return await answer
