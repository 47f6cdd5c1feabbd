"""The way to a cluster's workers: processes that are started here, or a scheduler somewhere."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from qlora_wgpu.cluster.extra import require_extra
from qlora_wgpu.cluster.quiet import quieten_dask
from qlora_wgpu.cluster.reaching import wait_for_scheduler
from qlora_wgpu.cluster.security import LOOPBACK, connection_security, temporary_security
from qlora_wgpu.config.schema import ClusterConfig
from qlora_wgpu.errors import ClusterError

_REACHED = 30.0  # seconds in which a scheduler has to answer
_STARTED = 120.0  # seconds in which worker processes have to be there
_CLOSED = 5.0  # seconds for an orderly end
_MET = 10.0  # seconds in which a worker has to answer


@dataclass
class Connection:
    """An open Dask client, and the processes that were started for it.

    Attributes:
        client: Asynchronous, on the loop that it was opened on; it connects to workers itself.
        address: Of the scheduler.
        security: How to connect.
        cluster: Of the processes started here; None with a scheduler of somebody's own.
    """

    client: Any
    address: str
    security: Any
    cluster: Any = None
    _passing: asyncio.Future[Any] | None = None

    @property
    def dashboard(self) -> str | None:
        """The address of Dask's dashboard, where there is one."""
        if find_spec("bokeh") is None:
            return None
        link = getattr(self.client, "dashboard_link", None)
        return str(link) if link else None

    async def unreached(self, worker: str) -> str | None:
        """Why this process cannot connect to a worker; None where it can.

        Args:
            worker: Its address.
        """
        options = self.security.get_connection_args("client")
        connect = import_module("distributed.comm").connect
        try:
            async with asyncio.timeout(_MET):
                comm = await connect(worker, timeout=_MET, **options)
        except TimeoutError:
            return "no answer"
        except OSError as err:
            return _reason(err)
        comm.abort()
        return None

    async def passing(self) -> Any:
        """A client whose calls to workers the scheduler passes on; it is opened once.

        Raises:
            ClusterError: If the scheduler does not answer.
        """
        if self._passing is None:
            opening = _client(self.address, self.security, direct=False)
            self._passing = asyncio.ensure_future(opening)
        return await asyncio.shield(self._passing)

    async def close(self) -> None:
        """Ends it; what does not end in time is left behind."""
        passing = None
        if self._passing is not None:
            with contextlib.suppress(Exception):
                passing = await asyncio.wait_for(self._passing, _CLOSED)
        for each in (passing, self.client, self.cluster):
            if each is not None:
                await _ended(each)


async def connect(
    settings: ClusterConfig, processes: int, tell: Callable[[str], None]
) -> Connection:
    """Opens a connection; to be called on the loop that will use it.

    Args:
        settings: Where the workers are.
        processes: How many to start with ``local``.
        tell: Told that it waits for a scheduler.

    Raises:
        ConfigError: If the extra is not installed, or the way there is not safe.
        ClusterError: If there is no scheduler, or processes cannot be started.
    """
    require_extra()
    assert settings.scheduler is not None
    quieten_dask()
    if settings.scheduler == "local":
        return await _local(processes)
    security = connection_security(
        settings.scheduler, settings.certificates, allow_plain_tcp=settings.allow_plain_tcp
    )
    await asyncio.to_thread(
        wait_for_scheduler, settings.scheduler, security, patience=_REACHED, tell=tell
    )
    client = await _client(settings.scheduler, security)
    return Connection(client, settings.scheduler, security)


async def _client(address: str, security: Any, *, direct: bool = True) -> Any:
    client = import_module("distributed").Client(
        address, security=security, asynchronous=True, direct_to_workers=direct, timeout=_REACHED,
        set_as_default=direct,
    )  # fmt: skip
    try:
        return await asyncio.wait_for(
            _opened(client), _REACHED
        )  # a greeting has no limit of Dask's
    except (OSError, TimeoutError) as err:
        await _ended(client)
        raise ClusterError(
            f"the scheduler at {address} does not answer: start it with `dask scheduler`, or see "
            f"whether address and certificates are right ({err})"
        ) from err


async def _local(processes: int) -> Connection:
    """A scheduler in this process, and workers in others, for this user alone."""
    security = temporary_security()
    cluster = import_module("distributed").LocalCluster(
        n_workers=processes, threads_per_worker=1, processes=True, host=LOOPBACK,
        protocol="tls://", security=security, asynchronous=True, memory_limit=0,
        dashboard_address=f"{LOOPBACK}:0",  # it has no TLS
        worker_dashboard_address=f"{LOOPBACK}:0",
        silence_logs=logging.CRITICAL,
    )  # fmt: skip
    try:
        await asyncio.wait_for(_opened(cluster), _STARTED)
        address = cluster.scheduler_address
        return Connection(await _client(address, security), address, security, cluster)
    except asyncio.CancelledError:  # by Ctrl-C
        await _ended(cluster)
        raise
    except (OSError, RuntimeError) as err:
        await _ended(cluster)
        raise ClusterError(
            "worker processes cannot be started: a Python script that trains with "
            'cluster.scheduler: local has to do so below `if __name__ == "__main__":`, since '
            f"they read it, too ({err})"
        ) from err


async def _ended(each: Any) -> None:
    """Closes a client or a cluster, as far as it lets itself be closed."""
    with contextlib.suppress(Exception):
        await asyncio.wait_for(each.close(), _CLOSED)


def _reason(error: OSError) -> str:
    """What Dask was told by the system, without what it makes of it."""
    cause = error.__cause__ or error.__context__ or error
    return " ".join(str(cause).split()) or type(cause).__name__


async def _opened(each: Any) -> Any:
    return await each
