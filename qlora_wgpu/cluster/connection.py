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


@dataclass
class Connection:
    """An open Dask client, and the processes that were started for it.

    Attributes:
        client: Asynchronous, on the loop that it was opened on.
        cluster: Of the processes started here; None with a scheduler of somebody's own.
    """

    client: Any
    cluster: Any = None

    @property
    def dashboard(self) -> str | None:
        """The address of Dask's dashboard, where there is one."""
        if find_spec("bokeh") is None:
            return None
        link = getattr(self.client, "dashboard_link", None)
        return str(link) if link else None

    async def close(self) -> None:
        """Ends it; what does not end in time is left behind."""
        for each in (self.client, self.cluster):
            if each is not None:
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(each.close(), _CLOSED)


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
    return Connection(await _client(settings.scheduler, security))


async def _client(address: Any, security: Any) -> Any:
    client = import_module("distributed").Client(
        address, security=security, asynchronous=True, direct_to_workers=True, timeout=_REACHED
    )
    try:
        return await asyncio.wait_for(
            _opened(client), _REACHED
        )  # a greeting has no limit of Dask's
    except (OSError, TimeoutError) as err:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(client.close(), _CLOSED)
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
        return Connection(await _client(cluster.scheduler_address, security), cluster)
    except (OSError, RuntimeError) as err:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(cluster.close(), _CLOSED)
        raise ClusterError(
            "worker processes cannot be started: a Python script that trains with "
            'cluster.scheduler: local has to do so below `if __name__ == "__main__":`, since '
            f"they read it, too ({err})"
        ) from err


async def _opened(each: Any) -> Any:
    return await each
