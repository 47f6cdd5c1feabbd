"""Blocks on the workers of a Dask cluster: sent, answered, and sent again where that is needed.

Each worker process holds one Dask actor, which has the model: a call to it goes from this process
to that one and back, past the scheduler, and its results are stored nowhere. Which worker gets
which block is decided in ``division``; here is what happens to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import pickle
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from qlora_wgpu.cluster.blocks import FloatArray, Identity, RemoteWorker, Specification, Sums
from qlora_wgpu.cluster.division import Division, Order, Work, in_order
from qlora_wgpu.errors import ClusterError, DeviceLostError, OutOfMemoryError, QLoRAError

_LOOK = 0.5  # seconds between two looks at which workers there are
_LONG = 15.0  # seconds after which another worker is asked, too
_ALONE = 3.0  # seconds without a worker after which that is told
_TICK = 0.2  # seconds after which it is asked again who is late
_SILENCE = 10.0  # seconds that the scheduler may be silent
_PROBE = 2.0  # seconds between two questions to a worker that is suspect

_T = TypeVar("_T")
Deliver = Callable[[int, Sums], None]
Check = Callable[[Identity], "str | None"]


@dataclass(eq=False)
class _Member:
    """A worker process that there is."""

    name: str
    address: str
    key: Any  # that tells it from another one at the same address
    actor: Any = None
    identity: Identity | None = None
    version: int = -1  # of the parameters that it has
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    is_out: bool = False  # refused, or left out for what it did
    probing: bool = False


class _Gone(Exception):
    """A worker is not there any more."""


class Engine:
    """The workers of a cluster, as one that computes blocks. Lives on one asyncio loop."""

    def __init__(
        self,
        client: Any,
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
            client: An asynchronous Dask client.
            worker_class: What each worker process gets an instance of.
            specify: What a worker of a name opens.
            check: A sentence about what is wrong with a worker, or None.
            tell: Told of workers that come, go and fail.
            fixed: Whether blocks are given in turn, whatever was measured.
            patience: Seconds without any progress that end it.
            queued: Blocks that wait at a worker while it computes another.
        """
        self._client = client
        self._worker_class = worker_class
        self._specify = specify
        self._check = check
        self._tell = tell
        self._patience = patience
        self._division = Division(fixed=fixed, queued=queued)
        self._members: dict[str, _Member] = {}  # by address
        self._version = 0
        self._parameters: FloatArray | None = None
        self._results: deque[tuple[Order, _Member, Sums]] = deque()  # of older steps, too
        self._changed = asyncio.Event()
        self._progress = time.monotonic()
        self._heard = time.monotonic()
        self._last_reason = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self._was_alone = False
        self._failure: BaseException | None = None

    # -- workers ---------------------------------------------------------------------------

    async def begin(self, count: int) -> None:
        """Waits for workers that have opened the model.

        Args:
            count: How many.

        Raises:
            ClusterError: If they do not come, or all that came are refused.
        """
        self._spawn(self._watch())
        self._progress = time.monotonic()
        while len(self._ready) < count:
            opening = [m for m in self._members.values() if not m.is_out and m.identity is None]
            if self._members and not opening and not self._ready and self._last_reason:
                raise ClusterError(f"no worker can be used: {self._last_reason}")
            await self._wait_for_change()
            self._check_patience(f"{len(self._ready)} of {count} workers are there")

    @property
    def _is_alone(self) -> bool:
        """Whether no worker is there, and none opens the model."""
        return all(member.is_out for member in self._members.values())

    @property
    def _ready(self) -> list[_Member]:
        there = (m for m in self._members.values() if not m.is_out and m.identity is not None)
        return sorted(there, key=lambda m: in_order(m.name))

    @property
    def identities(self) -> dict[str, Identity]:
        """What each worker is, in the order of their names."""
        return {m.name: m.identity for m in self._ready if m.identity is not None}

    async def work(self) -> dict[str, Work]:
        """What each worker has done since this was asked last."""
        return self._division.work()

    async def close(self) -> None:
        """Lets go of the workers, which free what they hold."""
        for task in self._tasks:
            task.cancel()
        self._members.clear()

    async def _watch(self) -> None:
        """Looks again and again which workers there are."""
        while True:
            try:
                if self._client.scheduler is None:
                    raise OSError("the connection to the scheduler is lost")
                info = await asyncio.wait_for(self._client.scheduler.identity(), _SILENCE)
                self._heard = time.monotonic()
                self._meet(info["workers"])
            except (OSError, TimeoutError):
                self._look_for_scheduler()
            except Exception as err:  # nothing may hang for a thing that was not thought of
                self._failure = err
            self._changed.set()
            await asyncio.sleep(_LOOK)

    def _look_for_scheduler(self) -> None:
        """Notes that the scheduler is lost, once it has been for too long."""
        limit = min(_SILENCE, self._patience)
        if time.monotonic() - self._heard > limit or self._client.status == "closed":
            self._failure = ClusterError(
                f"the scheduler has not answered for {time.monotonic() - self._heard:.0f} seconds"
            )

    def _meet(self, there: dict[str, dict[str, Any]]) -> None:
        """Compares the workers that the scheduler knows with those that are known here."""
        keys = {address: _key(info) for address, info in there.items()}
        for address, member in list(self._members.items()):
            if keys.get(address) != member.key:
                self._part(member, "it is gone")
        for address, info in there.items():
            if address not in self._members:
                member = _Member(self._named(info, address), address, keys[address])
                self._members[address] = member
                self._progress = time.monotonic()
                self._spawn(self._open(member))

    def _named(self, info: dict[str, Any], address: str) -> str:
        """A worker's name; its address, too, where another has that name."""
        name = str(info.get("name", address))
        names = {member.name for member in self._members.values()}
        return f"{name} ({address})" if name in names else name

    def _part(self, member: _Member, why: str) -> None:
        """Forgets a worker that is not there any more."""
        if self._members.get(member.address) is member:
            del self._members[member.address]
        member.gone.set()
        if member.identity is not None and not member.is_out:
            self._division.remove(member.name)
            self._tell(f"worker {member.name}: {why}; its blocks go to others")
        self._changed.set()

    def _leave_out(self, member: _Member, why: str) -> None:
        """Gives a worker nothing any more, though it is there."""
        if member.is_out:
            return
        member.is_out = True
        self._division.remove(member.name)
        self._last_reason = f"worker {member.name}: {why}"
        self._tell(f"worker {member.name} is left out: {why}")
        member.actor = None
        self._changed.set()

    async def _open(self, member: _Member) -> None:
        """Has a worker open the model, and takes it in."""
        try:
            specification = self._specify(member.name)
            future = self._client.submit(
                pickle.loads, _made(self._worker_class, specification), actor=True, pure=False,
                workers=[member.address], allow_other_workers=False,
            )  # fmt: skip
            member.actor = await _unless(member.gone, future)
            identity: Identity = await self._call(member, "identity")
            problem = await asyncio.to_thread(self._check, identity)
        except _Gone:
            return
        except OSError as err:
            await self._unreachable(member, err)
            return
        except ModuleNotFoundError as err:
            self._leave_out(member, f"it lacks a package, {err.name}: install qlora-wgpu there")
            return
        except Exception as err:  # whatever a worker says
            self._leave_out(member, _sentence(err))
            return
        if problem is not None:
            self._leave_out(member, problem)
            return
        member.identity = identity
        self._division.add(member.name)
        self._progress = time.monotonic()
        self._tell_of(member, identity)
        self._changed.set()

    async def _unreachable(self, member: _Member, error: OSError) -> None:
        """Tries a worker again that could not be reached, if need be through the scheduler."""
        self._last_reason = f"worker {member.name} cannot be reached: {error}"
        if self._client.direct_to_workers and not self._ready:
            self._client.direct_to_workers = False  # a network that lets nobody but it through
            self._tell(f"{self._last_reason}; the scheduler passes on what goes there")
        await asyncio.sleep(_PROBE)
        if self._members.get(member.address) is member:
            del self._members[member.address]  # it is met again

    def _tell_of(self, member: _Member, identity: Identity) -> None:
        for text in identity.notes:
            self._tell(f"worker {member.name}: {text}")
        for other in self._ready:
            own = other.identity
            if other is not member and own is not None and own.device == identity.device:
                if (own.driver, own.kernels) != (identity.driver, identity.kernels):
                    self._tell(
                        f"workers {other.name} and {member.name} have the same GPU, but other "
                        "drivers or kernels: their results may differ in the last bits"
                    )
                return

    # -- blocks ----------------------------------------------------------------------------

    def publish(self, parameters: FloatArray) -> None:
        """The parameters with which blocks are computed from now on."""
        known = self._parameters
        if known is not None and np.array_equal(known.view(np.uint32), parameters.view(np.uint32)):
            return
        self._version += 1
        self._parameters = parameters

    async def compute(
        self, method: str, blocks: Sequence[tuple[Any, ...]], sizes: Sequence[int], deliver: Deliver
    ) -> None:
        """Computes all blocks of a step.

        Args:
            method: The worker's, ``"gradient"`` or ``"loss"``.
            blocks: Its arguments after the version.
            sizes: Each block's tokens, padding included.
            deliver: Takes each block's number and its sums, once, in any order.

        Raises:
            ClusterError: If nobody is left to compute them.
        """
        division = self._division
        division.begin(sizes)
        doubtful: dict[int, tuple[_Member, Sums]] = {}
        self._progress = time.monotonic()
        while not division.is_complete or doubtful:
            for order in division.next(time.monotonic()):
                member = next(m for m in self._ready if m.name == order.worker)
                self._spawn(self._send(member, order, method, blocks[order.block]))
            self._probe_suspects()
            await self._wait_for_change()
            while self._results:
                order, member, sums = self._results.popleft()
                if division.done(order, time.monotonic(), sums.seconds):
                    self._progress = time.monotonic()
                    self._take(order, member, sums, doubtful, deliver)
            for number in [n for n in doubtful if not division.is_left_to_others(n)]:
                division.settle(number)
                deliver(number, doubtful.pop(number)[1])
            if not division.is_complete or doubtful:
                self._check_patience("no block has come back")

    def _take(
        self, order: Order, member: _Member, sums: Sums,
        doubtful: dict[int, tuple[_Member, Sums]], deliver: Deliver,
    ) -> None:  # fmt: skip
        """Takes a block's first result, or its second where the first was not finite."""
        before = doubtful.pop(order.block, None)
        if sums.is_finite or before is not None:
            if before is not None and sums.is_finite:
                self._leave_out(
                    before[0],
                    f"it returned a gradient or loss that is not finite, where worker "
                    f"{member.name} did not",
                )
            deliver(order.block, sums)
        elif self._division.doubt(order):
            doubtful[order.block] = (member, sums)
        else:
            deliver(order.block, sums)

    async def _send(
        self, member: _Member, order: Order, method: str, block: tuple[Any, ...]
    ) -> None:
        """Has a worker compute a block; what goes wrong is its end, not the step's."""
        try:
            version = await self._write(member)
            self._division.begun(order, time.monotonic())
            sums = await self._call(member, method, version, *block)
            self._results.append((order, member, sums))
        except _Gone:
            self._division.failed(order)
        except OSError:
            self._division.failed(order)
            self._division.suspect(member.name)
        except QLoRAError as err:
            self._division.failed(order)
            member.version = -1
            if isinstance(err, OutOfMemoryError | DeviceLostError) or not isinstance(
                err, ClusterError
            ):
                self._leave_out(member, _sentence(err))
        except Exception as err:
            self._division.failed(order)
            self._leave_out(member, _sentence(err))
        finally:
            self._changed.set()

    async def _write(self, member: _Member) -> int:
        """Makes sure that a worker has the present parameters; their number."""
        async with member.writing:
            version, parameters = self._version, self._parameters
            if member.version != version:
                await self._call(member, "write", version, parameters)
                member.version = version
            return version

    def _probe_suspects(self) -> None:
        """Asks workers that have not answered whether they do again."""
        suspects = set(self._division.suspects)
        for member in self._ready:
            if member.name in suspects and not member.probing:
                member.probing = True
                self._spawn(self._probe(member))

    async def _probe(self, member: _Member) -> None:
        try:
            await asyncio.sleep(_PROBE)
            await self._call(member, "identity")
            self._division.answered(member.name)
            self._changed.set()
        except Exception:  # it is asked again
            pass
        finally:
            member.probing = False

    async def text(self, *details: Any) -> list[int]:
        """A text's continuation by one of the workers.

        Args:
            details: Arguments of the worker's method after the version.

        Raises:
            ClusterError: If nobody is left to write it.
            QLoRAError: If the model cannot.
        """

        async def written(member: _Member) -> list[int]:
            return list(await self._call(member, "text", await self._write(member), *details))

        return await self._anyone(written)

    async def neutral(self) -> FloatArray:
        """A flat adapter that does nothing, from one of the workers.

        Raises:
            ClusterError: If nobody is left to tell.
        """

        async def told(member: _Member) -> FloatArray:
            values: FloatArray = await self._call(member, "neutral")
            return values

        return await self._anyone(told)

    async def _anyone(self, ask: Callable[[_Member], Coroutine[Any, Any, _T]]) -> _T:
        """Asks one worker, and another if that takes long; the first answer counts.

        Raises:
            ClusterError: If nobody answers.
        """
        self._progress = time.monotonic()
        asked: dict[asyncio.Task[_T], _Member] = {}
        tried: set[_Member] = set()
        since = -math.inf
        try:
            while True:
                suspects = self._division.suspects
                free = [m for m in self._ready if m not in tried and m.name not in suspects]
                if free and (not asked or time.monotonic() - since > _LONG):
                    since = time.monotonic()
                    tried.add(free[0])
                    asked[asyncio.ensure_future(ask(free[0]))] = free[0]
                self._probe_suspects()
                await self._wait_for_change()
                for task in [task for task in asked if task.done()]:
                    member = asked.pop(task)
                    try:
                        return task.result()
                    except (_Gone, OSError, ClusterError):  # somebody else is asked
                        member.version = -1
                        self._division.suspect(member.name)
                        tried.discard(member)
                self._check_patience("no worker has answered")
        finally:
            for task in asked:
                task.cancel()

    # -- within ----------------------------------------------------------------------------

    async def _call(self, member: _Member, method: str, *arguments: Any) -> Any:
        """Calls a worker's method.

        Raises:
            _Gone: If the worker goes meanwhile.
            OSError: If it cannot be reached.
        """
        if member.actor is None or member.gone.is_set():
            raise _Gone
        try:
            return await _unless(member.gone, getattr(member.actor, method)(*arguments))
        except RuntimeError as err:  # Dask has lost the actor
            if "Actor" not in str(err):
                raise
            self._part(member, "its process was lost")
            raise _Gone from None

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _wait_for_change(self) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), _TICK)
        self._changed.clear()
        if self._failure is not None:
            raise self._failure

    def _check_patience(self, what: str) -> None:
        """Ends what has had no progress for too long.

        Raises:
            ClusterError: If that is so.
        """
        waited = time.monotonic() - self._progress
        if self._is_alone and not self._was_alone and waited > _ALONE:
            self._was_alone = True
            self._tell(
                f"no worker is there: waiting for one for {self._patience:g} seconds at most "
                "(cluster.patience)"
            )
        if self._ready:
            self._was_alone = False  # it is told again the next time
        if waited > self._patience:
            reason = f"; {self._last_reason}" if self._last_reason else ""
            raise ClusterError(f"{what} for {self._patience:g} seconds (cluster.patience){reason}")


def _made(worker_class: type[RemoteWorker], specification: Specification) -> bytes:
    """A pickle that makes a worker where it is loaded.

    The scheduler, which looks into tasks, sees bytes: it needs neither this package nor a GPU.
    """

    class Made:
        def __reduce__(self) -> tuple[Any, ...]:
            return worker_class, (specification,)

    return pickle.dumps(Made())


async def _unless(gone: asyncio.Event, answer: Any) -> Any:
    """Waits for an answer, or for the worker to be gone.

    Raises:
        _Gone: If it is gone first.
    """
    asked = asyncio.ensure_future(_awaited(answer))
    waiting = asyncio.ensure_future(gone.wait())
    try:
        await asyncio.wait({asked, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return asked.result()
        raise _Gone
    finally:
        waiting.cancel()
        if not asked.done():
            asked.cancel()


async def _awaited(answer: Any) -> Any:
    return await answer


def _key(info: dict[str, Any]) -> Any:
    """What tells a worker process from a later one at the same address."""
    return info.get("id"), info.get("local_directory")


def _sentence(error: BaseException) -> str:
    """What went wrong on a worker, in one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, QLoRAError) else f"{type(error).__name__}: {text}"
