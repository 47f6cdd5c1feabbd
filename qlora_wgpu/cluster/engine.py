"""The workers of a Dask cluster, as one that computes a step's blocks and answers questions.

Each worker process holds one Dask actor, which has the model: a call to it goes from this process
to that one and back, past the scheduler, and its results are stored nowhere. Which workers there
are is known to ``Members`` (``workers.py``), and which of them gets which block is decided by
``Division`` (``scheduler.py``).
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from qlora_wgpu.cluster.blocks import (
    Asked,
    Expected,
    FloatArray,
    Identity,
    RemoteWorker,
    Specification,
    Sums,
    WrongAnswerError,
    check_parameters,
    check_text,
)
from qlora_wgpu.cluster.connection import Connection
from qlora_wgpu.cluster.scheduler import Division, Order, Work
from qlora_wgpu.cluster.workers import Check, Gone, Member, Members, Opening, Progress, sentence
from qlora_wgpu.errors import ClusterError, DeviceLostError, OutOfMemoryError, QLoRAError

# ---- parameters, patience and suspects -----------------------------------------------------------


class Parameters:
    """The present parameters, and their number."""

    def __init__(self, members: Members) -> None:
        """There are none yet."""
        self._members = members
        self._version = 0
        self._values: FloatArray | None = None

    def publish(self, values: FloatArray) -> None:
        """The parameters with which blocks are computed from now on."""
        known = self._values
        if known is not None and np.array_equal(known.view(np.uint32), values.view(np.uint32)):
            return
        self._version += 1
        self._values = values

    async def give(self, member: Member) -> int:
        """Makes sure that a worker has the present parameters; their number."""
        async with member.writing:
            version, values = self._version, self._values
            if member.version != version:
                await self._members.call(member, "write", version, values)
                member.version = version
            return version


_SOON = 3.0  # seconds after which it is told that somebody is missing
_OPENING = 1800.0  # seconds that a worker may take to open the model, however short the patience


class Patience:
    """Ends what has had no progress for too long."""

    def __init__(
        self, seconds: float, progress: Progress, members: Members, tell: Callable[[str], None]
    ) -> None:
        """Has told nothing yet."""
        self._seconds = seconds
        self._progress = progress
        self._members = members
        self._tell = tell
        self._told = ""

    def check(self, what: str, *, count: int = 1) -> None:
        """Tells who is missing, and ends what has had no progress for too long."""
        waited, members = self._progress.waited, self._members
        missing = ""
        if members.is_nobody_there:
            missing = "no worker is there: waiting for one"
        elif len(members.ready) < count and not members.opening:
            missing = f"{len(members.ready)} of {count} workers are there: waiting for more"
        if missing and missing != self._told and waited > _SOON:
            self._told = missing
            limit = f"for {self._seconds:g} seconds at most (cluster.patience)"
            self._tell(f"{missing} {limit}")
        if members.ready and not missing:
            self._told = ""  # it is told again the next time
        if waited > (max(self._seconds, _OPENING) if members.opening else self._seconds):
            reason = f"; {members.last_reason}" if members.last_reason else ""
            if names := ", ".join(member.name for member in members.opening):
                reason += f"; the model is still being opened by {names}"
            raise ClusterError(f"{what} for {waited:.0f} seconds (cluster.patience){reason}")


_PAUSE = 2.0  # seconds between two questions


class Suspects:
    """Workers that have not answered for too long: asks each by itself, while others work."""

    def __init__(self, members: Members, division: Division, progress: Progress) -> None:
        """Asks nobody yet."""
        self._members = members
        self._division = division
        self._progress = progress

    def probe(self) -> None:
        """Begins to ask those who are not being asked."""
        suspects = set(self._division.suspects)
        for member in self._members.ready:
            if member.name in suspects and not member.is_probed:
                member.is_probed = True
                self._progress.spawn(self._probe(member))

    async def _probe(self, member: Member) -> None:
        try:
            await asyncio.sleep(_PAUSE)
            await self._members.call(member, "identity")
            self._division.answered(member.name)
            self._progress.notify()
        except Exception:  # it is asked again
            pass
        finally:
            member.is_probed = False


# ---- questions and steps -------------------------------------------------------------------------

_LONG = 15.0  # seconds after which another worker is asked, too

_T = TypeVar("_T")


async def anyone(
    ask: Callable[[Member], Coroutine[Any, Any, _T]],
    division: Division,
    members: Members,
    suspects: Suspects,
    progress: Progress,
    patience: Patience,
) -> _T:
    """Asks one worker, and another if that fails or takes long; the first answer counts."""
    progress.advance()
    asked: dict[asyncio.Task[_T], Member] = {}
    tried: set[Member] = set()
    failure: QLoRAError | None = None
    since = -math.inf
    try:
        while True:
            free = [
                member
                for member in members.ready
                if member not in tried and member.name not in division.suspects
            ]
            if failure is not None and not (free or asked):
                raise failure
            if free and (not asked or time.monotonic() - since > _LONG):
                since = time.monotonic()
                tried.add(free[0])
                asked[asyncio.ensure_future(ask(free[0]))] = free[0]
            suspects.probe()
            await progress.change()
            for task in [task for task in asked if task.done()]:
                member = asked.pop(task)
                try:
                    return task.result()
                except WrongAnswerError as err:
                    members.leave_out(member, str(err))
                except (Gone, OSError, ClusterError):  # somebody else is asked
                    member.version = -1
                    division.suspect(member.name)
                    tried.discard(member)
                except (OutOfMemoryError, DeviceLostError) as err:  # another may have more room
                    failure = err
                except QLoRAError:
                    raise
                except Exception as err:  # whatever a worker says
                    members.leave_out(member, sentence(err))
            patience.check("no worker has answered")
    finally:
        for task in asked:
            task.cancel()


Deliver = Callable[[int, Sums], None]


@dataclass(frozen=True, eq=False)
class Block:
    """What a worker is asked, and what form its answer has."""

    given: tuple[Any, ...]  # arguments of the worker's method, after ``Asked``
    expected: Expected  # the answer's form


class Steps:
    """Computes one step after another."""

    def __init__(
        self,
        division: Division,
        members: Members,
        parameters: Parameters,
        suspects: Suspects,
        progress: Progress,
        patience: Patience,
    ) -> None:
        """Has done none yet."""
        self._division = division
        self._members = members
        self._parameters = parameters
        self._suspects = suspects
        self._progress = progress
        self._patience = patience
        self._results: deque[tuple[Order, Member, Sums]] = deque()  # of older steps, too
        self._doubtful: dict[int, tuple[Member, Sums]] = {}  # by block

    async def compute(
        self, method: str, blocks: Sequence[Block], sizes: Sequence[int], deliver: Deliver
    ) -> None:
        """Computes all blocks of a step.

        Args:
            method: The worker's, such as ``"gradient"`` or ``"loss"``.
            blocks: What is asked, and the form of the answer.
            sizes: Each block's tokens, padding included.
            deliver: Takes each block's number and its sums, once, in any order.
        """
        division = self._division
        division.begin(sizes, method)
        self._doubtful = {}
        self._progress.advance()
        while not division.is_complete or self._doubtful:
            ready = {member.name: member for member in self._members.ready}
            for order in division.next(time.monotonic()):
                work = self._send(ready[order.worker], order, method, blocks[order.block])
                self._progress.spawn(work)
            self._suspects.probe()
            await self._progress.change()
            while self._results:
                order, member, sums = self._results.popleft()
                if division.done(order, time.monotonic(), sums.seconds):
                    self._progress.advance()
                    self._take(order, member, sums, deliver)
            self._settle(deliver)
            if not division.is_complete or self._doubtful:
                self._patience.check("no block has come back")

    def _take(self, order: Order, member: Member, sums: Sums, deliver: Deliver) -> None:
        """Takes a block's first result, or its second where the first was not finite."""
        before = self._doubtful.pop(order.block, None)
        if sums.is_finite or before is not None:
            if before is not None and sums.is_finite:
                self._members.leave_out(
                    before[0],
                    f"it returned a gradient or loss that is not finite, where worker "
                    f"{member.name} did not",
                )
            deliver(order.block, sums)
        elif self._division.doubt(order):
            self._doubtful[order.block] = (member, sums)
        else:
            deliver(order.block, sums)

    def _settle(self, deliver: Deliver) -> None:
        """Takes results that are not finite where nobody is left who could know better."""
        left = [n for n in self._doubtful if not self._division.is_left_to_others(n)]
        for number in left:
            self._division.settle(number)
            deliver(number, self._doubtful.pop(number)[1])

    async def _send(self, member: Member, order: Order, method: str, block: Block) -> None:
        """Has a worker compute a block; what goes wrong is its end, not the step's."""
        try:
            version = await self._parameters.give(member)
            self._division.begun(order, time.monotonic())
            asked = Asked(version, secrets.randbits(62))
            sums = await self._members.call(member, method, asked, *block.given)
            self._results.append((order, member, block.expected.check(asked, sums)))
        except Gone:
            self._division.failed(order)
        except OSError:
            self._division.failed(order)
            self._division.suspect(member.name)
        except QLoRAError as err:
            self._division.failed(order)
            member.version = -1
            if isinstance(err, WrongAnswerError) or not isinstance(err, ClusterError):
                self._members.leave_out(member, sentence(err))
        except Exception as err:
            self._division.failed(order)
            self._members.leave_out(member, sentence(err))
        finally:
            self._progress.notify()


# ---- the engine ----------------------------------------------------------------------------------


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
        """Waits for workers that have opened the model."""
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
        """
        await self._steps.compute(method, blocks, sizes, deliver)

    async def text(self, ids: list[int], more: int, *details: Any, vocab_size: int) -> list[int]:
        """A text's continuation by one of the workers."""

        async def written(member: Member) -> list[int]:
            version = await self._parameters.give(member)
            written = await self._members.call(member, "text", version, ids, more, *details)
            return check_text(written, more, vocab_size)

        return await self._anyone(written)

    async def neutral(self, length: int) -> FloatArray:
        """A flat adapter that does nothing, of so many floats, from one of the workers."""

        async def told(member: Member) -> FloatArray:
            return check_parameters(await self._members.call(member, "neutral"), length)

        return await self._anyone(told)

    async def _anyone(self, ask: Callable[[Member], Coroutine[Any, Any, _T]]) -> _T:
        return await anyone(
            ask, self._division, self._members, self._suspects, self._progress, self._patience
        )
