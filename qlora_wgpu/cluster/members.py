"""Which workers there are: they come, are taken in or refused, and go."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

from qlora_wgpu.cluster.blocks import Identity
from qlora_wgpu.cluster.division import Division
from qlora_wgpu.cluster.member import Gone, Member, ProcessLost
from qlora_wgpu.cluster.opening import Opening
from qlora_wgpu.cluster.orders import in_order
from qlora_wgpu.cluster.progress import Progress
from qlora_wgpu.errors import ClusterError, QLoRAError

_LOOK = 0.5  # seconds between two looks at which workers there are
_SILENCE = 10.0  # seconds that the scheduler may be silent
_AGAIN = 2.0  # seconds after which a worker that cannot be reached is tried again
_REFUSING = 2.0  # seconds for telling a worker that it is refused

Check = Callable[[Identity], "str | None"]


class Members:
    """The workers of a cluster, kept as the scheduler knows them. Lives on one asyncio loop."""

    def __init__(
        self,
        client: Any,
        opening: Opening,
        check: Check,
        tell: Callable[[str], None],
        division: Division,
        progress: Progress,
    ) -> None:
        """Knows no worker yet.

        Args:
            client: An asynchronous Dask client.
            opening: Has workers open the model.
            check: A sentence about what is wrong with a worker, or None.
            tell: Told of workers that come, go and fail.
            division: Gets to know workers that may compute, and those that no longer may.
            progress: Is told of all changes.
        """
        self._client = client
        self._opening = opening
        self._check = check
        self._tell = tell
        self._division = division
        self._progress = progress
        self._members: dict[str, Member] = {}  # by address
        self._met: set[str] = set()  # names
        self._heard = time.monotonic()
        self.last_reason = ""

    # -- who is there ----------------------------------------------------------------------

    @property
    def is_nobody_there(self) -> bool:
        """Whether no worker is there, and none opens the model."""
        return not any(member.is_ready or member.is_opening for member in self._members.values())

    @property
    def opening(self) -> list[Member]:
        """Workers that open the model."""
        return [member for member in self._members.values() if member.is_opening]

    @property
    def ready(self) -> list[Member]:
        """Workers that may compute, in the order of their names."""
        there = (member for member in self._members.values() if member.is_ready)
        return sorted(there, key=lambda member: in_order(member.name))

    @property
    def only_refused(self) -> bool:
        """Whether there are workers, and none of them is of any use."""
        return bool(self._members) and all(m.is_out for m in self._members.values())

    # -- coming and going ------------------------------------------------------------------

    async def watch(self, silence: float) -> None:
        """Looks again and again which workers there are.

        Args:
            silence: Seconds after which a scheduler that says nothing is lost, where they are
                fewer than usual.
        """
        while True:
            try:
                if self._client.scheduler is None:
                    raise OSError("the connection to the scheduler is lost")
                async with asyncio.timeout(_SILENCE):
                    info = await self._client.scheduler.identity()
                self._heard = time.monotonic()
                self._meet(info["workers"])
            except (OSError, TimeoutError):
                self._look_for_scheduler(min(_SILENCE, silence))
            except Exception as err:  # nothing may hang for a thing that was not thought of
                self._progress.fail(err)
            self._progress.notify()
            await asyncio.sleep(_LOOK)

    def _look_for_scheduler(self, limit: float) -> None:
        """Notes that the scheduler is lost, once it has been for too long."""
        silent = time.monotonic() - self._heard
        if silent > limit or self._client.status == "closed":
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
                member = Member(self._named(info, address), address, keys[address])
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

    async def _take_in(self, member: Member) -> None:
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
        self._division.add(member.name)
        self._progress.advance()
        self._tell_of(member, identity)
        self._progress.notify()

    async def _opened(self, member: Member) -> Identity:
        """What a worker is, once it has opened the model; one that is not reached is tried again.

        Raises:
            Gone: If it goes meanwhile.
            Exception: What opening the model raises.
        """
        while True:
            try:
                return await self._opening.open(member)
            except OSError as err:
                member.is_reached = False
                self.last_reason = self._opening.unreachable(member, err)
                self._progress.notify()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_AGAIN):
                    await member.gone.wait()
                raise Gone
            member.is_reached = True

    def _tell_of(self, member: Member, identity: Identity) -> None:
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

    def _part(self, member: Member, why: str) -> None:
        """Forgets a worker that is not there any more; who notices it later tells nothing."""
        if member.gone.is_set():
            return
        if self._members.get(member.address) is member:
            del self._members[member.address]
        member.gone.set()
        if member.is_ready:
            self._division.remove(member.name)
            self._tell(f"worker {member.name}: {why}; its blocks go to others")
        self._progress.notify()

    def leave_out(self, member: Member, why: str) -> None:
        """Gives a worker nothing any more, though it is there."""
        if member.is_out:
            return
        member.is_out = True
        self._division.remove(member.name)
        self.last_reason = f"worker {member.name}: {why}"
        self._tell(f"worker {member.name} is left out: {why}")
        member.actor = None
        self._progress.notify()

    async def call(self, member: Member, method: str, *arguments: Any) -> Any:
        """Calls a worker's method; one whose process is lost is forgotten.

        Raises:
            As ``Member.call`` does.
        """
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
