"""Which workers there are: they come, are taken in or refused, open the model, and go."""

import asyncio
import contextlib
import pickle
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from qlora_wgpu.cluster.blocks import (
    WorkerClass,
    WorkerInfo,
    WorkerSpec,
    WrongAnswerError,
    made,
    unpacked,
)
from qlora_wgpu.cluster.connection import Connection
from qlora_wgpu.cluster.scheduler import Scheduler, in_order
from qlora_wgpu.errors import ClusterError, QLoRAError

# ---- progress ------------------------------------------------------------------------------------

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
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)  # nothing may hang for a thing that was not thought of

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
        """Waits until something changes, or for a moment."""
        with contextlib.suppress(TimeoutError):  # wait_for may lose a cancellation
            async with asyncio.timeout(_TICK):
                await self._changed.wait()
        self._changed.clear()
        if self._failure is not None:
            raise self._failure


# ---- a worker ------------------------------------------------------------------------------------


class Gone(Exception):
    """A worker is not there any more."""


class ProcessLost(Gone):
    """Dask has noticed first that the worker's process is gone."""


@dataclass(eq=False)
class WorkerHandle:
    """A worker process that there is."""

    name: str  # the worker's
    address: str  # where it listens
    key: Any  # what tells it from another process at the same address
    actor: Any = None  # Dask's proxy of the ``Actor`` there, once it is made
    # What it is, once it has opened the model and nothing is wrong with it
    identity: WorkerInfo | None = None
    version: int = -1  # of the parameters that it has
    # Held while parameters are on their way to it
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    # Set once it is not there any more
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    is_reached: bool = True  # whether it could be connected to when that was tried last
    is_out: bool = False  # whether it was refused, or left out for what it did
    is_probed: bool = False  # whether it is being asked if it answers again

    @property
    def is_ready(self) -> bool:
        """Whether it may compute."""
        return self.identity is not None and not self.is_out

    @property
    def is_opening(self) -> bool:
        """Whether it opens the model, as far as is known."""
        return self.identity is None and self.is_reached and not self.is_out

    async def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the worker."""
        if self.actor is None or self.gone.is_set():
            raise Gone
        try:
            return unpacked(await self.unless_gone(self.actor.answer(method, *arguments)))
        except RuntimeError as err:
            if "Actor" not in str(err):
                raise
            raise ProcessLost from None

    async def unless_gone(self, answer: Any) -> Any:
        """Waits for an answer, or for the worker to be gone."""
        asked = asyncio.ensure_future(answer)
        waiting = asyncio.ensure_future(self.gone.wait())
        try:
            await asyncio.wait({asked, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return asked.result()
            raise Gone
        finally:
            waiting.cancel()
            asked.cancel()


# ---- all workers ---------------------------------------------------------------------------------

_LOOK = 0.5  # seconds between two looks at which workers there are
_SILENCE = 10.0  # seconds that the scheduler may be silent
_AGAIN = 2.0  # seconds after which a worker that cannot be reached is tried again
_REFUSING = 2.0  # seconds for telling a worker that it is refused

Check = Callable[[WorkerInfo], "str | None"]


class WorkerRegistry:
    """The workers of a cluster, kept as the scheduler knows them. Lives on one asyncio loop."""

    def __init__(
        self,
        connection: Connection,
        worker_class: WorkerClass,
        specify: Callable[[str], WorkerSpec],  # what a worker of a name opens
        check: Check,
        tell: Callable[[str], None],
        scheduler: Scheduler,  # gets to know workers that may compute
        progress: Progress,
    ) -> None:
        """Knows no worker yet."""
        self._connection = connection
        self._worker_class = worker_class
        self._specify = specify
        self._check = check
        self._tell = tell
        self._scheduler = scheduler
        self._progress = progress
        self._told: set[str] = set()
        self._members: dict[str, WorkerHandle] = {}  # by address
        self._met: set[str] = set()  # names
        self._heard = time.monotonic()
        self.last_reason = ""

    # -- who is there ----------------------------------------------------------------------

    @property
    def is_nobody_there(self) -> bool:
        """Whether no worker is there, and none opens the model."""
        return not any(member.is_ready or member.is_opening for member in self._members.values())

    @property
    def opening(self) -> list[WorkerHandle]:
        """Workers that open the model."""
        return [member for member in self._members.values() if member.is_opening]

    @property
    def ready(self) -> list[WorkerHandle]:
        """Workers that may compute, in the order of their names."""
        there = (member for member in self._members.values() if member.is_ready)
        return sorted(there, key=lambda member: in_order(member.name))

    @property
    def only_refused(self) -> bool:
        """Whether there are workers, and none of them is of any use."""
        return bool(self._members) and all(m.is_out for m in self._members.values())

    # -- coming and going ------------------------------------------------------------------

    async def watch(self, silence: float) -> None:
        """Looks again and again which workers there are."""
        while True:
            try:
                if self._connection.client.scheduler is None:
                    raise OSError("the connection to the scheduler is lost")
                async with asyncio.timeout(_SILENCE):
                    info = await self._connection.client.scheduler.identity()
                self._heard = time.monotonic()
                self._meet(info["workers"])
            except (OSError, TimeoutError):
                self._look_for_scheduler(min(_SILENCE, silence))
            self._progress.notify()
            await asyncio.sleep(_LOOK)

    def _look_for_scheduler(self, limit: float) -> None:
        """Notes that the scheduler is lost, once it has been for too long."""
        silent = time.monotonic() - self._heard
        if silent > limit or self._connection.client.status == "closed":
            self._progress.fail(
                ClusterError(f"the scheduler has not answered for {silent:.0f} seconds")
            )

    def _meet(self, there: dict[str, dict[str, Any]]) -> None:
        """Compares the workers that the scheduler knows with those that are known here."""
        keys = {address: _key(info) for address, info in there.items()}
        for address, member in list(self._members.items()):
            if keys.get(address) != member.key:
                self._part(member, "it is gone")
        for address, info in there.items():
            if address not in self._members:
                member = WorkerHandle(self._named(info, address), address, keys[address])
                self._members[address] = member
                if member.name not in self._met:  # one that begins anew for ever is no progress
                    self._met.add(member.name)
                    self._progress.advance()
                self._progress.spawn(self._take_in(member))

    def _named(self, info: dict[str, Any], address: str) -> str:
        """A worker's name; its address, too, where another has that name."""
        name = str(info.get("name", address))
        names = {member.name for member in self._members.values()}
        return f"{name} ({address})" if name in names else name

    async def _take_in(self, member: WorkerHandle) -> None:
        """Has a worker open the model, and lets it compute if nothing is wrong with it."""
        try:
            identity = await self._opened(member)
            problem = await asyncio.to_thread(self._check, identity)
        except Gone as err:
            if isinstance(err, ProcessLost):
                self._part(member, "its process was lost")
            return
        except ModuleNotFoundError as err:
            self.leave_out(member, f"it lacks a package, {err.name}: install qlora-wgpu there")
            return
        except Exception as err:  # whatever a worker says
            self.leave_out(member, sentence(err))
            return
        if problem is not None:
            with contextlib.suppress(Exception):  # its own user is told, too, if that can be
                async with asyncio.timeout(_REFUSING):
                    await self.call(member, "refused", problem)
            self.leave_out(member, problem)
            return
        member.identity = identity
        self._scheduler.add(member.name)
        self._progress.advance()
        self._tell_of(member, identity)
        self._progress.notify()

    async def _opened(self, member: WorkerHandle) -> WorkerInfo:
        """What a worker is, once it has opened the model; one not reached is tried again."""
        while True:
            try:
                return await self.open(member)
            except OSError as err:
                member.is_reached = False
                self.last_reason = f"worker {member.name} cannot be reached: {err}"
                self._tell_once(f"{self.last_reason}; it is tried again")
                self._progress.notify()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_AGAIN):
                    await member.gone.wait()
                raise Gone
            member.is_reached = True

    async def open(self, member: WorkerHandle) -> WorkerInfo:
        """Makes a worker's actor, which opens the model; what it says that it is."""
        client = self._connection.client
        if (why := await self._connection.unreached(member.address)) is not None:
            client = await self._connection.passing()
            self._tell_once(
                f"worker {member.name} cannot be reached from here ({why}): the scheduler passes "
                "on what goes there and comes back"
            )
        future = client.submit(
            pickle.loads, made(self._worker_class, self._specify(member.name)), actor=True,
            pure=False, workers=[member.address], allow_other_workers=False,
        )  # fmt: skip
        with client.as_current():  # the actor's calls go through the client that is, then
            member.actor = await member.unless_gone(future)
        identity = await member.call("identity")
        if not isinstance(identity, WorkerInfo):
            raise WrongAnswerError(f"it says that it is a {type(identity).__name__}")
        return identity

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._tell(text)

    def _tell_of(self, member: WorkerHandle, identity: WorkerInfo) -> None:
        for text in identity.notes:
            self._tell(f"worker {member.name}: {text}")
        for other in self.ready:
            own = other.identity
            if other is not member and own is not None and own.device == identity.device:
                if (own.driver, own.kernels) != (identity.driver, identity.kernels):
                    self._tell(
                        f"workers {other.name} and {member.name} have the same GPU, but other "
                        "drivers or kernels: their results may differ in the last bits"
                    )
                return

    def _part(self, member: WorkerHandle, why: str) -> None:
        """Forgets a worker that is not there any more; who notices it later tells nothing."""
        if member.gone.is_set():
            return
        if self._members.get(member.address) is member:
            del self._members[member.address]
        member.gone.set()
        if member.is_ready:
            self._scheduler.remove(member.name)
            self._tell(f"worker {member.name}: {why}; its blocks go to others")
        self._progress.notify()

    def leave_out(self, member: WorkerHandle, why: str) -> None:
        """Gives a worker nothing any more, though it is there."""
        if member.is_out:
            return
        member.is_out = True
        self._scheduler.remove(member.name)
        self.last_reason = f"worker {member.name}: {why}"
        self._tell(f"worker {member.name} is left out: {why}")
        member.actor = None
        self._progress.notify()

    async def call(self, member: WorkerHandle, method: str, *arguments: Any) -> Any:
        """Calls a worker's method; one whose process is lost is forgotten."""
        try:
            return await member.call(method, *arguments)
        except ProcessLost:
            self._part(member, "its process was lost")
            raise


def _key(info: dict[str, Any]) -> Any:
    """What tells a worker process from a later one at the same address."""
    return info.get("id"), info.get("local_directory")


def sentence(error: BaseException) -> str:
    """What went wrong on a worker, in one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, QLoRAError) else f"{type(error).__name__}: {text}"
