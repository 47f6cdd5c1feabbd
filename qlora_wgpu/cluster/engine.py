"""The workers of a Dask cluster, as one that computes.

Each worker process holds one Dask actor, which has the model: a call to it goes from this process
to that one and back, past the scheduler, and its results are stored nowhere. Which workers there
are is known to ``members``, which of them gets which block is decided in ``division``, and what
happens to it is in ``steps``.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from qlora_wgpu.cluster.asking import anyone
from qlora_wgpu.cluster.blocks import FloatArray, Identity, RemoteWorker, Specification
from qlora_wgpu.cluster.connection import Connection
from qlora_wgpu.cluster.division import Division
from qlora_wgpu.cluster.expected import check_parameters, check_text
from qlora_wgpu.cluster.member import Member
from qlora_wgpu.cluster.members import Check, Members
from qlora_wgpu.cluster.opening import Opening
from qlora_wgpu.cluster.orders import Work
from qlora_wgpu.cluster.parameters import Parameters
from qlora_wgpu.cluster.patience import Patience
from qlora_wgpu.cluster.progress import Progress
from qlora_wgpu.cluster.steps import Block, Deliver, Steps
from qlora_wgpu.cluster.suspects import Suspects
from qlora_wgpu.errors import ClusterError

_T = TypeVar("_T")


class Engine:
    """Computes blocks on whatever workers there are. Lives on one asyncio loop."""

    def __init__(
        self,
        connection: Connection,
        worker_class: type[RemoteWorker],
        specify: Callable[[str], Specification],
        check: Check,
        tell: Callable[[str], None],
        *,
        fixed: bool,
        patience: float,
        queued: int = 1,
    ) -> None:
        """Knows no worker yet.

        Args:
            connection: The way to the scheduler and the workers.
            worker_class: What each worker process gets an instance of.
            specify: What a worker of a name opens.
            check: A sentence about what is wrong with a worker, or None.
            tell: Told of workers that come, go and fail.
            fixed: Whether blocks are given in turn, whatever was measured.
            patience: Seconds without any progress that end it.
            queued: Blocks that wait at a worker while it computes another.
        """
        self._division = Division(fixed=fixed, queued=queued)
        self._progress = Progress()
        opening = Opening(connection, worker_class, specify, tell)
        self._members = Members(
            connection.client, opening, check, tell, self._division, self._progress
        )
        self._parameters = Parameters(self._members)
        self._suspects = Suspects(self._members, self._division, self._progress)
        self._silence = patience
        self._patience = Patience(patience, self._progress, self._members, tell)
        self._steps = Steps(
            self._division, self._members, self._parameters, self._suspects, self._progress,
            self._patience,
        )  # fmt: skip

    async def begin(self, count: int) -> None:
        """Waits for workers that have opened the model.

        Args:
            count: How many.

        Raises:
            ClusterError: If they do not come, or all that came are refused.
        """
        members = self._members
        self._progress.spawn(members.watch(self._silence))
        self._progress.advance()
        while len(members.ready) < count:
            if members.only_refused:
                raise ClusterError(f"no worker can be used: {members.last_reason}")
            await self._progress.change()
            there = f"{len(members.ready)} of {count} workers are there"
            self._patience.check(there, count=count)

    async def stop(self) -> None:
        """Ends what goes on by itself, before the connection does."""
        await self._progress.stop()

    @property
    def identities(self) -> dict[str, Identity]:
        """What each worker is, in the order of their names."""
        return {m.name: m.identity for m in self._members.ready if m.identity is not None}

    async def work(self) -> dict[str, Work]:
        """What each worker has done since this was asked last."""
        return self._division.work()

    def publish(self, parameters: FloatArray) -> None:
        """The parameters with which blocks are computed from now on."""
        self._parameters.publish(parameters)

    async def compute(
        self, method: str, blocks: Sequence[Block], sizes: Sequence[int], deliver: Deliver
    ) -> None:
        """Computes all blocks of a step.

        Args:
            method: The worker's, such as ``"gradient"`` or ``"loss"``.
            blocks: What is asked, and the form of the answer.
            sizes: Each block's tokens, padding included.
            deliver: Takes each block's number and its sums, once, in any order.

        Raises:
            ClusterError: If nobody is left to compute them.
        """
        await self._steps.compute(method, blocks, sizes, deliver)

    async def text(self, ids: list[int], more: int, *details: Any, vocab_size: int) -> list[int]:
        """A text's continuation by one of the workers.

        Args:
            ids: The text so far.
            more: Maximum number of tokens to add.
            details: Further arguments of the worker's method.
            vocab_size: Tokens that there are.

        Raises:
            ClusterError: If nobody is left to write it.
            QLoRAError: If the model cannot.
        """

        async def written(member: Member) -> list[int]:
            version = await self._parameters.give(member)
            written = await self._members.call(member, "text", version, ids, more, *details)
            return check_text(written, more, vocab_size)

        return await self._anyone(written)

    async def neutral(self, length: int) -> FloatArray:
        """A flat adapter that does nothing, of so many floats, from one of the workers.

        Raises:
            ClusterError: If nobody is left to tell.
        """

        async def told(member: Member) -> FloatArray:
            return check_parameters(await self._members.call(member, "neutral"), length)

        return await self._anyone(told)

    async def _anyone(self, ask: Callable[[Member], Coroutine[Any, Any, _T]]) -> _T:
        return await anyone(
            ask, self._division, self._members, self._suspects, self._progress, self._patience
        )
