"""The workers of a Dask cluster, as one that computes a step's blocks and answers questions.

Each worker process holds one Dask actor, which has the model: a call to it goes from this process
to that one and back, past the scheduler, and its results are stored nowhere. Which workers there
are is known to ``WorkerRegistry`` (``workers.py``), and ``Scheduler`` (``scheduler.py``) decides
which of them gets which block.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from qlora_wgpu.cluster.blocks import (
    Asked,
    BlockResult,
    FloatArray,
    WorkerClass,
    WorkerInfo,
    WorkerSpec,
    WrongAnswerError,
)
from qlora_wgpu.cluster.connection import Connection
from qlora_wgpu.cluster.scheduler import Assignment, Scheduler
from qlora_wgpu.cluster.workers import Check, Gone, Progress, WorkerHandle, WorkerRegistry, sentence
from qlora_wgpu.errors import ClusterError, QLoRAError
from qlora_wgpu.training.observers import WorkerFigures

# ---- patience ------------------------------------------------------------------------------------

_SOON = 3.0  # seconds after which it is told that somebody is missing
_OPENING = 1800.0  # seconds that a worker may take to open the model, however short the patience


class Watchdog:
    """Ends what has had no progress for too long."""

    def __init__(
        self,
        seconds: float,
        progress: Progress,
        members: WorkerRegistry,
        tell: Callable[[str], None],
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


# ---- the engine ----------------------------------------------------------------------------------

_PAUSE = 2.0  # seconds after which a worker that is silent is asked whether it answers


@dataclass(frozen=True, eq=False)
class Block:
    """What a worker is asked."""

    given: tuple[Any, ...]  # arguments of the worker's method, after ``Asked``
    # The answer, if it is one to this; else raises ``WrongAnswerError``
    check: Callable[[Asked, Any], Any]


Deliver = Callable[[int, Any], None]


@dataclass(eq=False)
class _Step:
    """Blocks that are being computed."""

    method: str  # the worker's, such as ``"gradient"`` or ``"loss"``
    blocks: Sequence[Block]
    deliver: Deliver
    is_question: bool  # whether who has no answer may have others
    # By block, who gave what is not finite; another is to compute the block, too
    doubted: dict[int, WorkerHandle] = field(default_factory=dict)
    unable: set[WorkerHandle] = field(default_factory=set)  # who has no answer to a question
    failure: Exception | None = None


class Engine:
    """Computes blocks on whatever workers there are. Lives on one asyncio loop."""

    def __init__(
        self,
        connection: Connection,
        worker_class: WorkerClass,  # what each worker process gets an instance of
        specify: Callable[[str], WorkerSpec],  # what a worker of a name opens
        check: Check,
        tell: Callable[[str], None],
        *,
        fixed: bool,
        patience: float,
    ) -> None:
        """Knows no worker yet."""
        self._scheduler = Scheduler(fixed=fixed)
        self._progress = Progress()
        self._members = WorkerRegistry(
            connection, worker_class, specify, check, tell, self._scheduler, self._progress
        )
        self._silence = patience
        self._patience = Watchdog(patience, self._progress, self._members, tell)
        self._version, self._parameters = -1, np.zeros(0, np.float32)

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
    def identities(self) -> dict[str, WorkerInfo]:
        """What each worker is, in the order of their names."""
        return {m.name: m.identity for m in self._members.ready if m.identity is not None}

    async def figures(self) -> tuple[WorkerFigures, ...]:
        """What each worker has done since this was asked last."""
        return self._scheduler.figures(time.monotonic())

    def publish(self, parameters: FloatArray) -> None:
        """The parameters with which blocks are computed from now on."""
        if not np.array_equal(self._parameters.view(np.uint32), parameters.view(np.uint32)):
            self._version, self._parameters = self._version + 1, parameters

    async def compute(
        self, method: str, blocks: Sequence[Block], sizes: Sequence[int], deliver: Deliver,
        *, is_question: bool = False,
    ) -> None:  # fmt: skip
        """Computes all blocks of a step by a worker's method.

        ``sizes`` are each block's tokens, padding included; ``deliver`` takes each block's number
        and what it gives, once, in any order.
        """
        step = _Step(method, blocks, deliver, is_question)
        scheduler = self._scheduler
        scheduler.begin(sizes, method)
        self._progress.advance()
        while not scheduler.is_complete:
            ready = {member.name: member for member in self._members.ready}
            for order in scheduler.next(time.monotonic()):
                self._progress.spawn(self._send(ready[order.worker], order, step))
            for name in scheduler.silent(time.monotonic()):
                if not ready[name].is_probed:
                    ready[name].is_probed = True
                    self._progress.spawn(self._probe(ready[name]))
            await self._progress.change()
            if step.failure is not None:
                raise step.failure
            if not scheduler.is_complete:
                what = "no worker has answered" if is_question else "no block has come back"
                self._patience.check(what)

    async def ask(self, method: str, *given: Any, check: Callable[[Any], Any]) -> Any:
        """What one worker says; another is asked where that fails or takes long."""
        answers: list[Any] = []
        question = Block(given, lambda asked, answer: check(answer))

        def deliver(block: int, answer: Any) -> None:
            answers.append(answer)

        await self.compute(method, [question], [1], deliver, is_question=True)
        return answers[0]

    async def _send(self, member: WorkerHandle, order: Assignment, step: _Step) -> None:
        """Has a worker compute a block; what goes wrong is its end, not the step's."""
        scheduler, block = self._scheduler, step.blocks[order.block]
        try:
            asked = Asked(await self._give(member), secrets.randbits(62))
            answer = await self._members.call(member, step.method, asked, *block.given)
            answer = block.check(asked, answer)
        except Exception as err:  # whatever a worker says
            scheduler.failed(order)
            self._fail(member, order, step, err)
        else:
            seconds = answer.seconds if isinstance(answer, BlockResult) else 0.0
            if scheduler.done(order, time.monotonic(), seconds):
                self._progress.advance()
                self._take(member, order, step, answer)
        finally:
            self._progress.notify()

    async def _give(self, member: WorkerHandle) -> int:
        """Makes sure that a worker has the present parameters; their number."""
        async with member.writing:
            version, parameters = self._version, self._parameters
            if member.version != version:
                await self._members.call(member, "write", version, parameters)
                member.version = version
            return version

    def _take(self, member: WorkerHandle, order: Assignment, step: _Step, answer: Any) -> None:
        """Takes a block's first result, or its second where the first was not finite."""
        is_finite = not isinstance(answer, BlockResult) or answer.is_finite
        first = step.doubted.pop(order.block, None)
        if first is None and not is_finite:
            step.doubted[order.block] = member
            self._scheduler.reject(order)
            return
        if is_finite and first not in (None, member):
            self._members.leave_out(
                first,
                f"it returned a gradient or loss that is not finite, where worker {member.name} "
                "did not",
            )
        step.deliver(order.block, answer)

    def _fail(self, member: WorkerHandle, order: Assignment, step: _Step, error: Exception) -> None:
        """A worker has no result; what a cluster's own errors say of is no fault of its own."""
        is_told = isinstance(error, QLoRAError) and not isinstance(error, WrongAnswerError)
        if isinstance(error, Gone):
            return
        if isinstance(error, OSError):
            self._scheduler.pause(member.name)
        elif is_told and isinstance(error, ClusterError):
            member.version = -1
        elif is_told and step.is_question:
            if member in step.unable:  # nobody else is left
                step.failure = error
            step.unable.add(member)  # another may have more room
            self._scheduler.reject(order)
        else:
            self._members.leave_out(member, sentence(error))

    async def _probe(self, member: WorkerHandle) -> None:
        """Asks a silent worker, which answers once it is done with what it has."""
        try:
            await asyncio.sleep(_PAUSE)
            await self._members.call(member, "identity")
            self._scheduler.resume(member.name)
            self._progress.notify()
        except Exception:  # it is asked again
            pass
        finally:
            member.is_probed = False
