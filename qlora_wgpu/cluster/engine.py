"""Computes a step's blocks on the workers of a Dask cluster.

Each worker process holds one Dask actor with the model. Calls go directly from the owner to the
worker, not through Dask's scheduler. ``WorkerRegistry`` (``workers.py``) knows the workers, and
``Scheduler`` (``scheduler.py``) assigns blocks to them.
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

_SOON = 3.0  # seconds after which missing workers are reported
_OPENING = 1800.0  # minimum patience, in seconds, while a worker opens the model


class Watchdog:
    """Raises an error after too long without progress."""

    def __init__(
        self,
        seconds: float,
        progress: Progress,
        members: WorkerRegistry,
        tell: Callable[[str], None],
    ) -> None:
        """Limits the time without progress to ``seconds``."""
        self._seconds = seconds
        self._progress = progress
        self._members = members
        self._tell = tell
        self._reported = ""

    def check(self, what: str, *, count: int = 1) -> None:
        """Reports missing workers; raises ``ClusterError`` after too long without progress."""
        waited, members = self._progress.seconds_without, self._members
        missing = ""
        if members.is_empty:
            missing = "no worker is connected: waiting for one"
        elif len(members.ready) < count and not members.opening:
            missing = f"{len(members.ready)} of {count} workers are ready: waiting for more"
        if missing and missing != self._reported and waited > _SOON:
            self._reported = missing
            limit = f"for at most {self._seconds:g} seconds (cluster.patience)"
            self._tell(f"{missing} {limit}")
        if members.ready and not missing:
            self._reported = ""  # to be reported again the next time
        if waited > (max(self._seconds, _OPENING) if members.opening else self._seconds):
            reason = f"; {members.last_reason}" if members.last_reason else ""
            if names := ", ".join(member.name for member in members.opening):
                reason += f"; still opening the model: {names}"
            raise ClusterError(f"{what} for {waited:.0f} seconds (cluster.patience){reason}")


# ---- the engine ----------------------------------------------------------------------------------

_PAUSE = 2.0  # seconds between probes of a worker that does not respond


@dataclass(frozen=True, eq=False)
class Block:
    """A call of a worker's method."""

    given: tuple[Any, ...]  # arguments of the method, after ``Asked``
    # Returns a valid answer, else raises ``WrongAnswerError``
    check: Callable[[Asked, Any], Any]


Deliver = Callable[[int, Any], None]


@dataclass(eq=False)
class _Step:
    """The blocks of a step while they are computed."""

    method: str  # of the worker, such as ``"gradient"`` or ``"loss"``
    blocks: Sequence[Block]
    deliver: Deliver
    is_question: bool  # a worker that cannot answer may still compute blocks
    # By block, the worker whose result is not finite; another one computes the block as well
    doubted: dict[int, WorkerHandle] = field(default_factory=dict)
    unable: set[WorkerHandle] = field(default_factory=set)  # cannot answer the question
    failure: Exception | None = None


class Engine:
    """Computes blocks on all available workers. Lives on one asyncio loop."""

    def __init__(
        self,
        connection: Connection,
        worker_class: WorkerClass,  # instantiated in each worker process
        specify: Callable[[str], WorkerSpec],  # what the named worker opens
        check: Check,
        tell: Callable[[str], None],
        *,
        fixed: bool,
        patience: float,
    ) -> None:
        """Starts without workers."""
        self._scheduler = Scheduler(fixed=fixed)
        self._progress = Progress()
        self._members = WorkerRegistry(
            connection, worker_class, specify, check, tell, self._scheduler, self._progress
        )
        self._silence = patience
        self._patience = Watchdog(patience, self._progress, self._members, tell)
        self._version, self._parameters = -1, np.zeros(0, np.float32)

    async def begin(self, count: int) -> None:
        """Waits until ``count`` workers have opened the model."""
        members = self._members
        self._progress.spawn(members.watch(self._silence))
        self._progress.advance()
        while len(members.ready) < count:
            if members.all_excluded:
                raise ClusterError(f"all workers are excluded: {members.last_reason}")
            await self._progress.change()
            there = f"{len(members.ready)} of {count} workers were ready"
            self._patience.check(there, count=count)

    async def stop(self) -> None:
        """Cancels background tasks; to be called before the connection is closed."""
        await self._progress.stop()

    @property
    def identities(self) -> dict[str, WorkerInfo]:
        """All workers that are ready, sorted by name."""
        return {m.name: m.identity for m in self._members.ready if m.identity is not None}

    async def figures(self) -> tuple[WorkerFigures, ...]:
        """Each worker's numbers since the last call."""
        return self._scheduler.figures(time.monotonic())

    def publish(self, parameters: FloatArray) -> None:
        """Sets the parameters that blocks are computed with."""
        if not np.array_equal(self._parameters.view(np.uint32), parameters.view(np.uint32)):
            self._version, self._parameters = self._version + 1, parameters

    async def compute(
        self, method: str, blocks: Sequence[Block], sizes: Sequence[int], deliver: Deliver,
        *, is_question: bool = False,
    ) -> None:  # fmt: skip
        """Computes all blocks of a step by a worker's method.

        ``sizes`` are each block's tokens, padding included. ``deliver`` is called once for each
        block, with its index and result, in any order.
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
                what = (
                    "no worker has answered" if is_question else "no worker has returned a result"
                )
                self._patience.check(what)

    async def ask(self, method: str, *given: Any, check: Callable[[Any], Any]) -> Any:
        """Calls a method on one worker, or on another one if that fails or takes too long."""
        answers: list[Any] = []
        question = Block(given, lambda asked, answer: check(answer))

        def deliver(block: int, answer: Any) -> None:
            answers.append(answer)

        await self.compute(method, [question], [1], deliver, is_question=True)
        return answers[0]

    async def _send(self, member: WorkerHandle, order: Assignment, step: _Step) -> None:
        """Computes a block on a worker; an error ends this assignment, not the step."""
        scheduler, block = self._scheduler, step.blocks[order.block]
        try:
            asked = Asked(await self._update(member), secrets.randbits(62))
            answer = await self._members.call(member, step.method, asked, *block.given)
            answer = block.check(asked, answer)
        except Exception as err:  # a worker may raise anything
            scheduler.failed(order)
            self._fail(member, order, step, err)
        else:
            seconds = answer.seconds if isinstance(answer, BlockResult) else 0.0
            if scheduler.done(order, time.monotonic(), seconds):
                self._progress.advance()
                self._take(member, order, step, answer)
        finally:
            self._progress.notify()

    async def _update(self, member: WorkerHandle) -> int:
        """Sends a worker the current parameters unless it has them; returns their version."""
        async with member.writing:
            version, parameters = self._version, self._parameters
            if member.version != version:
                await self._members.call(member, "write", version, parameters)
                member.version = version
            return version

    def _take(self, member: WorkerHandle, order: Assignment, step: _Step, answer: Any) -> None:
        """Delivers a result; one that is not finite only if another worker's is not either."""
        is_finite = not isinstance(answer, BlockResult) or answer.is_finite
        first = step.doubted.pop(order.block, None)
        if first is None and not is_finite:
            step.doubted[order.block] = member
            self._scheduler.reject(order)
            return
        if is_finite and first not in (None, member):
            self._members.exclude(
                first,
                f"it returned a gradient or loss that is not finite, worker {member.name} a finite "
                "one for the same block",
            )
        step.deliver(order.block, answer)

    def _fail(self, member: WorkerHandle, order: Assignment, step: _Step, error: Exception) -> None:
        """Handles an assignment without a result."""
        is_expected = isinstance(error, QLoRAError) and not isinstance(error, WrongAnswerError)
        if isinstance(error, Gone):
            return
        if isinstance(error, OSError):
            self._scheduler.pause(member.name)
        elif is_expected and isinstance(error, ClusterError):
            member.version = -1
        elif is_expected and step.is_question:
            if member in step.unable:  # no other worker is left
                step.failure = error
            step.unable.add(member)  # another worker may have more memory
            self._scheduler.reject(order)
        else:
            self._members.exclude(member, sentence(error))

    async def _probe(self, member: WorkerHandle) -> None:
        """Waits for a worker to respond, which it does after its current block."""
        try:
            await asyncio.sleep(_PAUSE)
            await self._members.call(member, "identity")
            self._scheduler.resume(member.name)
            self._progress.notify()
        except Exception:  # it is probed again
            pass
        finally:
            member.is_probed = False
