"""Workers: the registry that they join and leave, and how long a run waits for them."""

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
    pickled_actor,
    unpacked,
)
from qlora_wgpu.cluster.connection import Connection
from qlora_wgpu.cluster.scheduler import Scheduler, name_order
from qlora_wgpu.errors import ClusterError, QLoRAError

# ---- progress ------------------------------------------------------------------------------------

_TICK = 0.2  # maximum seconds between two checks for late blocks


class Progress:
    """Notifies of changes, and passes on errors of tasks. Lives on one asyncio loop."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self._advanced = time.monotonic()
        self._failure: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts a background task."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)  # an unforeseen error must not make the run hang

    async def stop(self) -> None:
        """Cancels all background tasks."""
        while self._tasks:
            for task in self._tasks:
                task.cancel()  # repeatedly, since Dask may swallow a cancellation
            await asyncio.wait(self._tasks, timeout=_TICK)

    def notify(self) -> None:
        """Wakes up ``change``."""
        self._changed.set()

    def advance(self) -> None:
        """Restarts the clock."""
        self._advanced = time.monotonic()

    def fail(self, error: BaseException) -> None:
        """Makes ``change`` raise an error."""
        self._failure = error

    @property
    def seconds_without(self) -> float:
        """Seconds without progress."""
        return time.monotonic() - self._advanced

    async def change(self) -> None:
        """Waits until something changes, at most one tick."""
        with contextlib.suppress(TimeoutError):  # wait_for may lose a cancellation
            async with asyncio.timeout(_TICK):
                await self._changed.wait()
        self._changed.clear()
        if self._failure is not None:
            raise self._failure


# ---- a worker ------------------------------------------------------------------------------------


class Gone(Exception):
    """The worker has left."""


class ProcessLost(Gone):
    """Dask reported that the worker's process has ended."""


@dataclass(eq=False)
class WorkerHandle:
    """A worker process."""

    name: str
    address: str  # where it listens
    key: Any  # identifies the process, as addresses are reused
    actor: Any = None  # Dask's proxy of its ``Actor``
    identity: WorkerInfo | None = None  # once it has opened the model and passed the check
    version: int = -1  # of its parameters
    # Held while parameters are sent
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    # Set when it has left
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    is_reachable: bool = True  # whether the last attempt to connect succeeded
    is_excluded: bool = False
    is_probed: bool = False  # whether a task waits for it to respond

    @property
    def is_ready(self) -> bool:
        """Whether it may compute."""
        return self.identity is not None and not self.is_excluded

    @property
    def is_opening(self) -> bool:
        """Whether it is opening the model."""
        return self.identity is None and self.is_reachable and not self.is_excluded

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
        """Waits for an answer; raises ``Gone`` if the worker leaves before."""
        answering = asyncio.ensure_future(answer)
        leaving = asyncio.ensure_future(self.gone.wait())
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                return answering.result()
            raise Gone
        finally:
            leaving.cancel()
            answering.cancel()


# ---- all workers ---------------------------------------------------------------------------------

_POLL = 0.5  # seconds between two requests for the list of workers
_SILENCE = 10.0  # seconds within which the scheduler must answer
_RETRY = 2.0  # seconds between attempts to reach a worker
_REFUSING = 2.0  # seconds for notifying an excluded worker

Check = Callable[[WorkerInfo], "str | None"]


class WorkerRegistry:
    """The workers of a cluster, kept in sync with Dask's scheduler. Lives on one asyncio loop."""

    def __init__(
        self,
        connection: Connection,
        worker_class: WorkerClass,
        specify: Callable[[str], WorkerSpec],  # what the named worker opens
        check: Check,
        report: Callable[[str], None],
        scheduler: Scheduler,  # informed of workers that are ready
        progress: Progress,
    ) -> None:
        self._connection = connection
        self._worker_class = worker_class
        self._specify = specify
        self._check = check
        self._report = report
        self._scheduler = scheduler
        self._progress = progress
        self._reported: set[str] = set()
        self._members: dict[str, WorkerHandle] = {}  # by address
        self._seen: set[str] = set()  # names
        self._heard = time.monotonic()
        self.last_reason = ""

    # -- which workers exist ---------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Whether no worker is ready or opening the model."""
        return not any(member.is_ready or member.is_opening for member in self._members.values())

    @property
    def opening(self) -> list[WorkerHandle]:
        """Workers that are opening the model."""
        return [member for member in self._members.values() if member.is_opening]

    @property
    def ready(self) -> list[WorkerHandle]:
        """Workers that may compute, sorted by name."""
        ready = (member for member in self._members.values() if member.is_ready)
        return sorted(ready, key=lambda member: name_order(member.name))

    @property
    def all_excluded(self) -> bool:
        """Whether there are workers and all of them are excluded."""
        return bool(self._members) and all(m.is_excluded for m in self._members.values())

    # -- joining and leaving ---------------------------------------------------------------

    async def watch(self, silence: float) -> None:
        """Polls the scheduler for its workers, until cancelled."""
        while True:
            try:
                if self._connection.client.scheduler is None:
                    raise OSError("the connection to the scheduler is lost")
                async with asyncio.timeout(_SILENCE):
                    info = await self._connection.client.scheduler.identity()
                self._heard = time.monotonic()
                self._compare(info["workers"])
            except (OSError, TimeoutError):
                self._look_for_scheduler(min(_SILENCE, silence))
            self._progress.notify()
            await asyncio.sleep(_POLL)

    def _look_for_scheduler(self, limit: float) -> None:
        """Fails if the scheduler has been lost for longer than the limit."""
        silent = time.monotonic() - self._heard
        if silent > limit or self._connection.client.status == "closed":
            self._progress.fail(
                ClusterError(f"the scheduler has not answered for {silent:.0f} seconds")
            )

    def _compare(self, listed: dict[str, dict[str, Any]]) -> None:
        """Registers new workers, and removes those that have left."""
        keys = {address: _key(info) for address, info in listed.items()}
        for address, member in list(self._members.items()):
            if keys.get(address) != member.key:
                self._remove(member, "it has left")
        for address, info in listed.items():
            if address not in self._members:
                member = WorkerHandle(self._unique_name(info, address), address, keys[address])
                self._members[address] = member
                if member.name not in self._seen:  # one that restarts forever is no progress
                    self._seen.add(member.name)
                    self._progress.advance()
                self._progress.spawn(self._admit(member))

    def _unique_name(self, info: dict[str, Any], address: str) -> str:
        """A worker's name, with its address if another worker has the same name."""
        name = str(info.get("name", address))
        names = {member.name for member in self._members.values()}
        return f"{name} ({address})" if name in names else name

    async def _admit(self, member: WorkerHandle) -> None:
        """Has a worker open the model, and admits it if it passes the check."""
        try:
            identity = await self._opened(member)
            problem = await asyncio.to_thread(self._check, identity)
        except Gone as err:
            if isinstance(err, ProcessLost):
                self._remove(member, "its process has ended")
            return
        except ModuleNotFoundError as err:
            self.exclude(
                member, f"the package {err.name} is missing on it: install qlora-wgpu there"
            )
            return
        except Exception as err:  # a worker may raise anything
            self.exclude(member, sentence(err))
            return
        if problem is not None:
            with contextlib.suppress(Exception):  # shown on the worker's own terminal, if possible
                async with asyncio.timeout(_REFUSING):
                    await self.call(member, "refused", problem)
            self.exclude(member, problem)
            return
        member.identity = identity
        self._scheduler.add(member.name)
        self._progress.advance()
        self._report_notes(member, identity)
        self._progress.notify()

    async def _opened(self, member: WorkerHandle) -> WorkerInfo:
        """Opens the model on a worker, and retries while it cannot be reached."""
        while True:
            try:
                return await self.open(member)
            except OSError as err:
                member.is_reachable = False
                self.last_reason = f"cannot reach worker {member.name}: {err}"
                self._report_once(f"{self.last_reason}; retrying")
                self._progress.notify()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RETRY):
                    await member.gone.wait()
                raise Gone
            member.is_reachable = True

    async def open(self, member: WorkerHandle) -> WorkerInfo:
        """Creates a worker's actor, which opens the model."""
        client = self._connection.client
        if (why := await self._connection.connection_error(member.address)) is not None:
            client = await self._connection.relayed_client()
            self._report_once(
                f"cannot connect to worker {member.name} directly ({why}): its traffic passes "
                "through the scheduler"
            )
        future = client.submit(
            pickle.loads, pickled_actor(self._worker_class, self._specify(member.name)), actor=True,
            pure=False, workers=[member.address], allow_other_workers=False,
        )  # fmt: skip
        with client.as_current():  # the actor's calls use the current client
            member.actor = await member.unless_gone(future)
        identity = await member.call("identity")
        if not isinstance(identity, WorkerInfo):
            raise WrongAnswerError(
                f"it returned a {type(identity).__name__} instead of its description"
            )
        return identity

    def _report_once(self, text: str) -> None:
        if text not in self._reported:
            self._reported.add(text)
            self._report(text)

    def _report_notes(self, member: WorkerHandle, identity: WorkerInfo) -> None:
        for text in identity.notes:
            self._report(f"worker {member.name}: {text}")
        for other in self.ready:
            own = other.identity
            if other is not member and own is not None and own.device == identity.device:
                if (own.driver, own.kernels) != (identity.driver, identity.kernels):
                    self._report(
                        f"workers {other.name} and {member.name} have the same GPU, but different "
                        "drivers or kernels: their results may differ in the last bits"
                    )
                return

    def _remove(self, member: WorkerHandle, why: str) -> None:
        """Removes a worker that has left; a second call does nothing."""
        if member.gone.is_set():
            return
        if self._members.get(member.address) is member:
            del self._members[member.address]
        member.gone.set()
        if member.is_ready:
            self._scheduler.remove(member.name)
            self._report(f"worker {member.name}: {why}; its blocks go to other workers")
        self._progress.notify()

    def exclude(self, member: WorkerHandle, why: str) -> None:
        """Assigns nothing to a worker any more."""
        if member.is_excluded:
            return
        member.is_excluded = True
        self._scheduler.remove(member.name)
        self.last_reason = f"worker {member.name}: {why}"
        self._report(f"worker {member.name} is excluded: {why}")
        member.actor = None
        self._progress.notify()

    async def call(self, member: WorkerHandle, method: str, *arguments: Any) -> Any:
        """Calls a worker's method; removes the worker if its process has ended."""
        try:
            return await member.call(method, *arguments)
        except ProcessLost:
            self._remove(member, "its process has ended")
            raise


def _key(info: dict[str, Any]) -> Any:
    """Identifies a worker process among all at its address."""
    return info.get("id"), info.get("local_directory")


def sentence(error: BaseException) -> str:
    """An error of a worker in one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, QLoRAError) else f"{type(error).__name__}: {text}"


# ---- patience ------------------------------------------------------------------------------------

_SOON = 3.0  # seconds after which missing workers are reported
# Minimum patience, in seconds, while a worker opens the model or samples completions
_SLOW = 1800.0


class Watchdog:
    """Raises an error after too long without progress."""

    def __init__(
        self, seconds: float, progress: Progress, members: WorkerRegistry,
        report: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._seconds = seconds
        self._progress = progress
        self._members = members
        self._report = report
        self._reported = ""

    def check(self, what: str, *, count: int = 1, is_slow: bool = False) -> None:
        """Reports missing workers; raises ``ClusterError`` after too long without progress.

        ``is_slow`` workers have more time while there are any.
        """
        waited, members = self._progress.seconds_without, self._members
        missing = ""
        if members.is_empty:
            missing = "no worker is connected: waiting for one"
        elif len(members.ready) < count and not members.opening:
            missing = f"{len(members.ready)} of {count} workers are ready: waiting for more"
        if missing and missing != self._reported and waited > _SOON:
            self._reported = missing
            limit = f"for at most {self._seconds:g} seconds (cluster.patience)"
            self._report(f"{missing} {limit}")
        if members.ready and not missing:
            self._reported = ""  # to be reported again the next time
        is_slow = bool(members.opening) or (is_slow and bool(members.ready))
        if waited > (max(self._seconds, _SLOW) if is_slow else self._seconds):
            reason = f"; {members.last_reason}" if members.last_reason else ""
            if names := ", ".join(member.name for member in members.opening):
                reason += f"; still opening the model: {names}"
            raise ClusterError(f"{what} for {waited:.0f} seconds (cluster.patience){reason}")
