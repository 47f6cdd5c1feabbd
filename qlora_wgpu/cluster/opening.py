"""Has a worker open the model: the actor that is made there, and the way that calls take to it."""

from __future__ import annotations

import pickle
from collections.abc import Callable

from qlora_wgpu.cluster.actor import made
from qlora_wgpu.cluster.blocks import Identity, RemoteWorker, Specification
from qlora_wgpu.cluster.connection import Connection
from qlora_wgpu.cluster.expected import WrongAnswerError
from qlora_wgpu.cluster.member import Member

Specify = Callable[[str], Specification]


class Opening:
    """Makes the actors of workers."""

    def __init__(
        self,
        connection: Connection,
        worker_class: type[RemoteWorker],
        specify: Specify,
        tell: Callable[[str], None],
    ) -> None:
        """Has made none yet.

        Args:
            connection: The way to the scheduler and the workers.
            worker_class: What each worker process gets an instance of.
            specify: What a worker of a name opens.
            tell: Told of workers that cannot be reached.
        """
        self._connection = connection
        self._worker_class = worker_class
        self._specify = specify
        self._tell = tell
        self._told: set[str] = set()

    async def open(self, member: Member) -> Identity:
        """What a worker is, once it has opened the model.

        Raises:
            Gone: If it goes meanwhile.
            OSError: If it cannot be reached, not even through the scheduler.
            Exception: What opening the model raises.
        """
        specification = self._specify(member.name)
        client = self._connection.client
        if (why := await self._connection.unreached(member.address)) is not None:
            client = await self._connection.passing()
            self._tell_once(
                f"worker {member.name} cannot be reached from here ({why}): the scheduler passes "
                "on what goes there and comes back"
            )
        future = client.submit(
            pickle.loads, made(self._worker_class, specification), actor=True, pure=False,
            workers=[member.address], allow_other_workers=False,
        )  # fmt: skip
        with client.as_current():  # the actor's calls go through the client that is, then
            member.actor = await member.unless_gone(future)
        identity = await member.call("identity")
        if not isinstance(identity, Identity):
            raise WrongAnswerError(f"it says that it is a {type(identity).__name__}")
        return identity

    def unreachable(self, member: Member, error: OSError) -> str:
        """Tells that a worker cannot be reached; the sentence."""
        text = f"worker {member.name} cannot be reached: {error}"
        self._tell_once(f"{text}; it is tried again")
        return text

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._tell(text)
